"""What every process of a run shares and no whole run shows."""

import gc

import pytest

from agrpo.lifecycle import without_collector


def test_the_collector_is_on_again_after_loading_also_after_a_failure():
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(OSError), without_collector():
        raise OSError
    assert gc.isenabled()
    gc.unfreeze()
