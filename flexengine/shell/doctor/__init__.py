"""Facts about this machine and this installation, and findings: what stops or slows jobs. No fact's failure stops the
others: each is caught and reported."""
