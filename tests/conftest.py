import os
import secrets

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton: its kernels then run in the interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


# one for the whole run: the processes of pytest-xdist must agree on the names of the tests, some of which hold it
os.environ.setdefault("FA3_TEST_SEED", str(secrets.randbelow(2**20)))


def pytest_collection_modifyitems(items):
    if not has_hopper():
        skip = pytest.mark.skip(reason="needs a Hopper GPU (compute capability 9.0)")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_inputs(request):
    """Every run draws other inputs; the seed of a failing test is in its report."""
    seed = torch.seed()
    request.node.user_properties.append(("seed", seed))
    print(f"torch.manual_seed({seed})")


@pytest.fixture(autouse=True)
def share_the_card():
    """Gives memory back after each test: an fp64 truth of 4k keys takes 10 GB, which processes beside this one need as well."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**28:
        torch.cuda.empty_cache()
