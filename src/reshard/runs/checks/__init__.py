"""What a launch may combine: each check once, for the doctor, for `reshard.guard` and for training.

A check is a function of facts about a machine, a script's numbers or a model. It starts nothing and knows no language:
it yields a `Violation`, whose texts the doctor has in both languages under its code.
"""
