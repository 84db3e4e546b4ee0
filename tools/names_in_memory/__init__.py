"""Builds `families/in_memory.json`: how names in memory differ from the Hub's, by transformers itself."""
