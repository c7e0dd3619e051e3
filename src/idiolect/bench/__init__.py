"""`idiolect bench`; with torch and numpy alone it runs as `python -m idiolect.bench`."""
