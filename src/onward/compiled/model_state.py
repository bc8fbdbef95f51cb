"""Detects whether a model has changed since the last decoding step, for compiled steps and for cached prefixes."""

from __future__ import annotations

from dataclasses import dataclass, field

from onward.compiled.fingerprint import Snapshot
from onward.model.decoder import Decoder


@dataclass(eq=False)
class ModelState:
    """The state of a model as of the last call of `follow`, to detect changes.

    Comparing everything on which the forward pass depends takes 0.1 to 1 ms. An engine therefore sets `confirmed` to
    False after user code has run, which may have changed the model; the next `follow` then compares everything. While
    the state is confirmed, `follow` only checks hooks, attached behavior and the settings of PyTorch.

    If the model is `owned`, as a server's is, its state is always confirmed: only hooks, attached behavior and
    operations that PyTorch counts can change it. The state of a model that is `kept` is used again by a later call, and
    not dropped while no request is active. Either way, the weights are read once to name cached prefixes, and again
    only after a change of the model's objects, their addresses or their version counters.
    """

    model: Decoder
    owned: bool = False
    kept: bool = False
    confirmed: bool = False
    snapshot: Snapshot | None = None
    key: tuple[object, ...] = ()  # key of the last snapshot; replaced only by a different key
    versions: list[int] = field(default_factory=list)
    changes: int = 0  # number of changes; results from before a change are out of date
    known: tuple[int, str | None] | None = None  # value of `changes`, and the model's fingerprint at that time

    def follow(self) -> Snapshot:
        """Compare the model with the last snapshot, and take a new one if it has changed."""
        last, confirmed = self.snapshot, self.confirmed
        same = last is not None and (last.has_same_hooks() if confirmed or self.owned else last.holds())
        if last and not confirmed and len(last.versioned) < len(last.inventory.tensors):  # some have no version
            self.known = None
        self.confirmed = True
        if last is None or not same:
            new = self.snapshot = Snapshot(self.model)
            key, versions = new.key, new.versions()
            if not last or (key, versions, new.hooks) != (self.key, self.versions, last.hooks):
                self.changes += 1
            self.key, self.versions = self.key if key == self.key else key, versions
            return new
        if (self.owned or not confirmed) and (versions := last.versions()) != self.versions:
            self.versions, self.changes = versions, self.changes + 1
            if last.factors and (key := last.key) != self.key:
                self.key = key
        return last

    def fingerprint(self) -> str | None:
        """Return a hash of the structure and the weights of the model, or None as `Snapshot.fingerprint` does."""
        snapshot = self.follow()
        if self.known is None or self.known[0] != self.changes:
            self.known = self.changes, snapshot.fingerprint()
        return self.known[1]

    def rest(self) -> None:
        """Drop the snapshot, which refers to the weights, unless it will be used again; called when no step follows
        soon."""
        if not (self.owned or self.kept):
            self.snapshot = self.known = None
