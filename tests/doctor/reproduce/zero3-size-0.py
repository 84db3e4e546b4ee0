"""ZeRO-3 saved empty placeholders instead of weights."""

# needs: deepspeed

import torch
from engine import SAVED
from small import load

rank = SAVED / "z3" / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
state = torch.load(rank, map_location="cpu", weights_only=False)["module"]
load().load_state_dict(state)
