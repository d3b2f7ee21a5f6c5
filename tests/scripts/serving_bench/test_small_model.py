"""Goal: what is compared with offline generation runs the same engine under both.

Method: the options, against those that a server takes.
"""

from scripts.serving_bench import small_model
from serving.config import ServingConfig
from sharding.config_file import override


def test_options_fit_the_clients() -> None:
    config = override(ServingConfig(), small_model._OPTIONS)
    assert config.engine.decode_rows[-1] == small_model.NUM_CLIENTS
    num_blocks = small_model.NUM_CLIENTS * -(-(small_model.NUM_TOKENS + 64) // 128)
    assert config.engine.num_blocks > num_blocks, "nobody may be preempted"
