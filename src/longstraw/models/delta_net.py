from contextlib import contextmanager
from dataclasses import dataclass
from torch import Tensor


@dataclass
class RecurrentCache:
    conv_tail: Tensor | None
    matrix_state: Tensor | None
    new_conv_tail: Tensor | None = None
    new_matrix_state: Tensor | None = None


@contextmanager
def replaced_delta_nets(modules):
    yield
