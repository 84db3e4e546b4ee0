"""What a launch may combine: each check once, for the guard before a start, for the doctor and for training.

A check is a function of facts about a machine, a script, a config or a checkpoint. It starts nothing. It yields
`Finding`s: problems with their texts in both languages, from the rule of their code (`rules.finding`).
"""
