"""Sources and destinations that are not on a disk, each with a local server."""
