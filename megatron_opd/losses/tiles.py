"""Sorts (row, id) pairs by the tile of logits that holds them, without waiting for the device.

Axes: T rows, N pairs, v this rank's slice of the vocabulary. Tiles number row tiles fastest: tile
(column, row) of the grid is column * row_tiles + row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """Holds the grid of tiles over this rank's logits [T, num_ids], and the pairs of each.

    The pairs of tile i are those from bounds[i] to bounds[i + 1]; the ones behind the last tile are
    of other ranks. place_N: where a pair stands among those given; row_N, id_N: within the whole
    grid, int32. bounds: int32 [tiles + 1].
    """

    num_rows: int
    num_ids: int
    tile_rows: int
    tile_ids: int
    place_N: torch.Tensor
    row_N: torch.Tensor
    id_N: torch.Tensor
    bounds: torch.Tensor

    @property
    def across(self) -> int:
        """Returns the number of row tiles."""
        return -(-self.num_rows // self.tile_rows)

    @property
    def down(self) -> int:
        """Returns the number of tiles along the vocabulary."""
        return -(-self.num_ids // self.tile_ids)

    @staticmethod
    def of(
        shape: tuple[int, int],
        tile: tuple[int, int],
        row_N: torch.Tensor,
        id_N: torch.Tensor,
        first_id: int,
    ) -> Tiles:
        """Sort pairs. shape: T and the ids of this rank, the first of which is `first_id`.

        Pairs must lie in the whole logits; nothing here can tell, as that would wait.
        """
        (num_rows, num_ids), (tile_rows, tile_ids) = shape, tile
        across, down = -(-num_rows // tile_rows), -(-num_ids // tile_ids)
        local_N = id_N - first_id
        here_N = (local_N >= 0) & (local_N < num_ids)
        tile_N = (local_N // tile_ids * across + row_N // tile_rows).where(here_N, across * down)
        tile_N, order_N = tile_N.sort(stable=True)
        edges = torch.arange(across * down + 1, device=tile_N.device)
        return Tiles(
            num_rows,
            num_ids,
            tile_rows,
            tile_ids,
            order_N.int(),
            row_N[order_N].int(),
            local_N[order_N].int(),
            torch.searchsorted(tile_N, edges).int(),
        )
