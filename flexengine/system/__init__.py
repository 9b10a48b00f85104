"""What the operating system gives this process: memory, cores, disk space and OpenMP threads; reads that are tried
again."""
