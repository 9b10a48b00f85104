"""The cache directory: the items that flexengine made in it, and their removal. Nothing outside it is touched."""
