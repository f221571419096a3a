"""For all contracts: helpers whose assertions are readable, and encodings of a third party."""
import pytest

pytest.register_assert_rewrite('contract_tools')

from common import ToyLayer, ToyShared, registered  # noqa: E402


@pytest.fixture(autouse=True, scope='module')
def third_party():
    with registered(ToyShared, ToyLayer):
        yield
