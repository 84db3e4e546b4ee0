"""The disk is full."""

from small import CURED

with open("out/metrics.jsonl" if CURED else "/dev/full", "w") as log:
    log.write('{"step": 1}\n')
    log.flush()
