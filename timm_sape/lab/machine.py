"""Describe the machine and the versions that results were measured with."""
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Optional

import timm
import torch

import timm_sape

__all__ = ['about', 'commit', 'hardware', 'memory_size', 'now']


def hardware(device: torch.device) -> str:
    """Describe the processor or GPU in one line."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    cpuinfo = Path('/proc/cpuinfo')
    found = re.search(r'model name\s*: (.*)', cpuinfo.read_text()) if cpuinfo.exists() else None
    return f'{found[1] if found else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads'


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done all its work."""
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def memory_size() -> Optional[int]:
    """Bytes of memory that this machine has, None where the system does not say."""
    try:
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def commit() -> str:
    """The commit of the checkout that this package runs from, with '-dirty' if files were changed; '' without one."""
    root = Path(timm_sape.__file__).resolve().parents[1]
    if not (root / '.git').exists():
        return ''
    command = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--exclude=*', '--abbrev=7']
    try:
        # Ctrl-C must not kill it: where we let Ctrl-C wait, the empty answer would be recorded as no commit.
        return subprocess.run(command, capture_output=True, text=True, start_new_session=True).stdout.strip()
    except FileNotFoundError:  # git is not installed
        return ''


def about(device: torch.device) -> str:
    """Describe hardware, versions and commit in one line."""
    checkout = commit()
    versions = f'torch {torch.__version__}, timm {timm.__version__}, timm-sape {timm_sape.__version__}'
    return f'{hardware(device)}; {versions}' + (f', commit {checkout}' if checkout else '')
