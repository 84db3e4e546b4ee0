"""What every part uses: problems, foreign text as it is printed, JSON and YAML of others, plugins."""
