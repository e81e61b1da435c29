"""Kernels are interpreted where no GPU is: Triton decides that when a kernel is defined, so before it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
