"""A function is called with an argument that it does not know."""

from accelerate.utils import set_seed
from small import CURED

set_seed(1, **({} if CURED else {"reproducible": True}))
