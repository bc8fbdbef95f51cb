"""The values that the sections share: sizes, the files of the model, the installed peers, and the machine's
bandwidth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.decode.models import PRECISIONS, Files, Sizes
from benchmarks.decode.peers import PEERS, Peer, Prompts
from benchmarks.decode.tables import K, in_turns
from onward.measuring.generation import Generation


@dataclass(frozen=True)
class Bench:
    sizes: Sizes
    precisions: Sequence[str]
    rounds: int
    root: Path  # a temporary folder
    absent: Mapping[str, str]  # libraries that are left out, see `missing`
    families: Sequence[str] | None = None  # families of the section `families`; None: all

    @property
    def files(self) -> Files:
        return Files(self.root / "model", self.sizes.config)

    def names(self, precision: str) -> list[str]:
        left_out = {*self.absent, *(["transformers"] if PRECISIONS[precision].quantize else [])}
        return [name for name in PEERS if name not in left_out]

    def peers(self, precision: str, rows: int = 1) -> dict[str, Peer]:
        """The model in each available library, for `rows` prompts at a time. Onward's engine has `rows` rows, as in
        `generate`."""
        options = {"onward": {"rows": rows}}
        return {name: PEERS[name](self.files, precision, **options.get(name, {})) for name in self.names(precision)}

    def generate(self, peers: Mapping[K, Peer], prompts: Prompts, new: int) -> dict[K, list[Generation]]:
        """The generations of each peer, one for each round."""
        return in_turns({name: partial(peer.generate, prompts, new) for name, peer in peers.items()}, self.rounds)


def decode_speeds(runs: Mapping[K, Sequence[Generation]]) -> dict[K, list[float]]:
    return {name: [run.decode_speed for run in found] for name, found in runs.items()}
