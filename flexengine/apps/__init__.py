"""Applications of the engine: each writes its requests to one file, which is run as one resumable job."""
