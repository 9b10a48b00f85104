"""What the operating system gives this process: memory, cores and disk space; reads that are tried again."""
