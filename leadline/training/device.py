"""On a GPU if there is one, or where the caller says."""

from __future__ import annotations

import re

import torch

from leadline.errors import LeadlineError


def choose_device(given: str | None) -> torch.device:
    """ "cpu", "cuda" or "cuda:1"; None: a GPU if there is one."""
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given):
        raise LeadlineError(f"device is {given!r}; give 'cpu', 'cuda' or nothing")
    device, found = torch.device(given), torch.cuda.device_count()
    if device.type == "cuda" and not found:
        raise LeadlineError(f"device is {given!r} and torch finds no GPU here; give 'cpu' or nothing")
    if device.type == "cuda" and (device.index or 0) >= found:
        raise LeadlineError(f"device is {given!r} and torch finds {found} GPU(s) here, counted from 0; give 'cuda'")
    return device
