"""Settings of the whole suite."""

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tensors here are small, and threads that wait for each other are many times slower
settings.register_profile("firm", deadline=None)  # a busy machine is no failure
settings.load_profile("firm")
