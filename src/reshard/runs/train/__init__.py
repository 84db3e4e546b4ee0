"""Training as a recipe: a script for TRL, or a command of ms-swift, that users can read, change and take with them."""
