"""What is given beside a log: scripts, configs, checkpoints, folders of runs, environments."""
