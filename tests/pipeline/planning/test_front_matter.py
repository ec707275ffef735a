from __future__ import annotations

import pytest

from reshard.pipeline.planning.front_matter import licence


@pytest.mark.parametrize(
    ("card", "stated"),
    [
        (b"---\nlicense: mit\ntags: [x]\n---\n# A model\n", "mit"),
        (b"---\ntags: [x]\nlicense: other   # ours\n---\n", "other"),
        (b"\xef\xbb\xbf---\r\nlicense: mit\r\n---\r\n# A model\r\n", "mit"),
        (b"\n\n--- \nlicense: mit\n---\n", "mit"),
        (b"---\nlicense: mit", "mit"),
        (b"---\nlicense:\n- mit\n- apache-2.0\n---\n", "mit"),
        (b"---\nlicense:\r\n  - mit\r\n---\r\n", "mit"),
        (b'---\n"license" : mit\n---\n', "mit"),
        (b"---\nlicense:\nlicense_name: x\n---\n", None),
        (b"---\ntags: [x]\n---\nlicense: mit\n", None),
        (b"no front matter", None),
        (b"---\nlicense:" + b" " * 1_000_000 + b"\rx\n---\n", None),  # which takes no time
        (b"---\nlicense: a" + b" " * 1_000_000 + b"b\n---\n", "a" + " " * 1_000_000 + "b"),
        (b"", None),
    ],
)
def test_a_licence_is_found_where_the_hub_finds_it(card: bytes, stated: str | None) -> None:
    assert licence(card) == stated
