"""An encoder block by block, for tests that write a protocol a second time."""

import torch


@torch.no_grad()
def blocks_of(encoder, pictures):
    """Tokens [b, 1 + N, D] behind each block, [CLS] first, without the last norm."""
    x = encoder.patch_embed(pictures) + encoder.pos_embed[:, 1:]
    first = encoder.cls_token + encoder.pos_embed[:, :1]
    x = torch.cat([first.expand(len(x), -1, -1), x], 1)
    raw = []
    for block in encoder.blocks:
        x = block(x)
        raw.append(x)
    return raw
