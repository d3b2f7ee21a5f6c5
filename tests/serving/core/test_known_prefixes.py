"""Goal: what is predicted to be cached is what prompts have in common with earlier ones, as far as
it can be gone on from. Method: chains by hand.
"""

import pytest

from serving.core.known_prefixes import KnownPrefixes


def chain(text: str) -> list[bytes]:
    """A key for each letter, which names all letters before it."""
    return [text[: n + 1].encode() for n in range(len(text))]


def test_prompts_are_gone_on_from_at_their_ends_and_where_they_part() -> None:
    known = KnownPrefixes(100)
    assert known.num_usable(chain("abcd")) == 0
    known.add(chain("abcd"))
    assert known.num_usable(chain("abcdef")) == 4 and known.num_usable(chain("abcd")) == 4
    # The first one that parts finds no end there; the next one does.
    assert known.num_usable(chain("abxy")) == 0
    known.add(chain("abxy"))
    assert known.num_usable(chain("abz")) == 2 and known.num_usable(chain("ab")) == 2
    assert known.num_usable(chain("abxyz")) == 4 and known.num_usable(chain("a")) == 0
    known.add([])
    assert known.num_usable([]) == 0 and len(known) == 6


def test_those_used_longest_ago_go_first_from_their_ends() -> None:
    known = KnownPrefixes(6)
    known.add(chain("abc"))
    known.add(chain("xyz"))
    known.add(chain("abc"))
    known.add(chain("pq"))
    assert len(known) == 6
    assert known.num_usable(chain("abc")) == 3 and known.num_usable(chain("pq")) == 2
    assert known.num_usable(chain("xyz")) == 0
    known.add(chain("uvwuvwuvw"))
    assert len(known) == 6 and known.num_usable(chain("uvwuvw")) == 0
    with pytest.raises(ValueError, match="keys_max is 0"):
        KnownPrefixes(0)
