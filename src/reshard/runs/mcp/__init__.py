"""`reshard mcp`: tools for coding agents, over the Model Context Protocol. They only read, below given folders."""
