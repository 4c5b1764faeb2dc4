"""The parameters of a Hugging Face folder, under our names, compared with the folder bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.core.arrays import bit_equal
from lockstep.core.backend import Arrays
from lockstep.core.config.sections import ModelConfig
from lockstep.core.errors import UserError
from lockstep.core.hub.config import model_of
from lockstep.core.hub.dtypes import widened
from lockstep.core.hub.family import HubFamily, Stored
from lockstep.core.hub.folder import CONFIG, HubFolder, Where, listed
from lockstep.core.hub.tensors import stored_tensors, their_shape, to_ours, to_theirs
from lockstep.core.model.names import parameter_shapes


@dataclass(frozen=True)
class HubModel:
    """A model in a folder: its settings, and where its tensors lie.

    names: their name by the table → the name in the files. left_out: descriptions of parts of the folder without a
    counterpart.
    """

    folder: HubFolder
    family: HubFamily
    model: ModelConfig
    stored: tuple[Stored, ...]
    names: Mapping[str, str]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, folder: HubFolder) -> HubModel:
        """Read the model in a folder.

        Raises UserError that names the fault: settings as `model_of`, tensors that are missing, too many or of another
        shape, and a head that differs from the embedding to which it is tied.
        """
        origin = str(folder.path / CONFIG)
        family, model, left_out = model_of(folder.config, origin)
        if model.layers > len(folder.tensors):
            raise UserError(f"{origin}: {model.layers:,} blocks, and the files hold {len(folder.tensors):,} tensors")
        stored = tuple(stored_tensors(family, model))
        names = _names(family, folder.tensors)
        if unread := _require_tensors(family, model, stored, folder, names):
            left_out.append(f"{listed(unread)}: left out, as transformers does not read it either")
        found = cls(folder, family, model, stored, names, tuple(left_out))
        found._require_tied()
        return found

    def parameters(self, dtype: type[np.floating]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each parameter by its canonical name, widened without loss.

        Raises UserError if a number is not finite, or is none of `dtype`.
        """
        shapes = parameter_shapes(self.model)
        for stored in self.stored:
            name = self.names[stored.theirs]
            array = widened(self.folder.read(name), dtype)
            if array is None:
                where = self.folder.tensors[name]
                wider = "; take precision.policy = 'fp64'" if where.dtype == "F64" and dtype is np.float32 else ""
                raise UserError(
                    f"{where.file}: {name} holds numbers that are not finite or not of {np.dtype(dtype).name}{wider}"
                )
            yield from to_ours(stored, array, shapes)

    def differences(self, params: Arrays) -> list[str]:
        """Return the file's tensors whose bits differ from our parameters in the file's own format."""
        differ = []
        for stored in self.stored:
            name = self.names[stored.theirs]
            theirs = self.folder.read(name)
            ours = to_theirs(stored, params.__getitem__)
            if ours.shape != theirs.shape or not bit_equal(ours.astype(theirs.dtype), theirs):
                differ.append(name)
        return differ

    def _require_tied(self) -> None:
        head = self.names.get(self.family.head)
        if not self.model.tied or head is None:
            return
        table = next(one for one in self.stored if "embed.weight" in one.ours)
        if not bit_equal(self.folder.read(head), self.folder.read(self.names[table.theirs])):
            raise UserError(
                f"{self.folder.tensors[head].file}: {head} is not {table.theirs}, to which config.json ties it "
                "(tie_word_embeddings)"
            )


def _names(family: HubFamily, tensors: Mapping[str, Where]) -> dict[str, str]:
    """Map each tensor's name in the family's table to its name in the files.

    The files leave the prefix out where the trunk alone was saved.
    """
    bare = not any(name.startswith(family.prefix) for name in tensors)
    return {name if not bare or name == family.head else family.prefix + name: name for name in tensors}


def _require_tensors(
    family: HubFamily, model: ModelConfig, stored: tuple[Stored, ...], folder: HubFolder, names: Mapping[str, str]
) -> list[str]:
    """Return the tensors that are not read. Raises UserError that names what is missing, too many, or misshapen."""
    shapes = parameter_shapes(model)
    due = {one.theirs: their_shape(one, shapes) for one in stored}
    if model.tied and family.head in names:
        due[family.head] = shapes["embed.weight"]
    missing = [name for name in due if name not in names]
    others = sorted(names.keys() - due.keys())
    unread = [name for name in others if any(map(name.endswith, family.constants))]
    extra = [name for name in others if name not in unread]
    said = [f"{folder.path}: {listed(missing)}: missing"] if missing else []
    said += [f"{folder.path}: {listed(extra)}: no tensor of this {family.architecture}"] if extra else []
    for name, shape in due.items():
        where = folder.tensors[names[name]] if name in names else None
        if where is not None and where.shape != shape and len(said) < 3:
            said.append(f"{where.file}: {name} has shape {list(where.shape)}; by config.json it is {list(shape)}")
    if said:
        raise UserError("; ".join(said))
    return unread
