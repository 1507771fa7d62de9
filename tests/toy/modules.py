"""The made-up family's modules in plain torch: what everything else is compared with."""
import math

import numpy
import torch
from torch import nn
from torch.nn import functional

EPSILON = 1e-6
SIDE, FRAMES, PATCH = 4, 2, 2  # pixels a side of a latent pixel, frames of a latent frame, latent pixels of a token


class Joint(nn.Module):
    """Attention of a video's and a text's tokens to both, queries and keys normalised head by head."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.heads, width = heads, heads * head_dim
        for stream in ("", "text_"):
            for name in ("q", "k", "v", "out"):
                setattr(self, f"{stream}{name}", nn.Linear(width, width))
            for name in "qk":
                setattr(self, f"{stream}norm_{name}", nn.RMSNorm(head_dim, EPSILON))

    def forward(self, video, text, counts, rotary):
        """The video's tokens have RoPE; of the text's, the first `counts` are attended to."""

        def project(array, stream, name):
            split = getattr(self, f"{stream}{name}")(array).unflatten(-1, (self.heads, -1))
            return getattr(self, f"{stream}norm_{name}")(split) if name in "qk" else split

        streams = {name: [project(array, stream, name) for stream, array in (("", video), ("text_", text))]
                   for name in "qkv"}
        for name in "qk":
            streams[name][0] = rotate(streams[name][0], *rotary)
        query, key, value = (torch.cat(streams[name], 1).transpose(1, 2) for name in "qkv")
        seen = torch.arange(key.shape[2])[None] < video.shape[1] + counts[:, None]
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None, None])
        out = out.transpose(1, 2).flatten(2)
        return self.out(out[:, : video.shape[1]]), self.text_out(out[:, video.shape[1]:])


def rotate(array, cosine, sine):
    """(batch, tokens, heads, head_dim), neighbouring lanes by one angle."""
    pairs = array.unflatten(-1, (-1, 2))
    turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    return array * cosine[:, None] + turned * sine[:, None]


class Layer(nn.Module):
    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        width = heads * head_dim
        self.attention = Joint(heads, head_dim)
        for stream in ("", "text_"):
            setattr(self, f"{stream}modulation", nn.Linear(width, 6 * width))
            setattr(self, f"{stream}mlp_in", nn.Linear(width, 2 * width))
            setattr(self, f"{stream}mlp_out", nn.Linear(2 * width, width))

    def forward(self, video, text, counts, time, rotary):
        streams, rows = {"": video, "text_": text}, {}
        for stream in streams:
            rows[stream] = getattr(self, f"{stream}modulation")(functional.silu(time))[:, None].chunk(6, -1)
        normed = [norm(array) * (1 + rows[stream][1]) + rows[stream][0] for stream, array in streams.items()]
        for (stream, array), out in zip(streams.items(), self.attention(*normed, counts, rotary)):
            array = array + rows[stream][2] * out
            wide = getattr(self, f"{stream}mlp_in")(norm(array) * (1 + rows[stream][4]) + rows[stream][3])
            out = getattr(self, f"{stream}mlp_out")(functional.gelu(wide, approximate="tanh"))
            streams[stream] = array + rows[stream][5] * out
        return tuple(streams.values())


def norm(array):
    return functional.layer_norm(array, array.shape[-1:], eps=EPSILON)


class Transformer(nn.Module):
    def __init__(self, layers: int, heads: int, head_dim: int, text_width: int, channels: int):
        super().__init__()
        width = heads * head_dim
        self.head_dim = head_dim
        self.video_in, self.text_in = nn.Linear(channels * PATCH**2, width), nn.Linear(text_width, width)
        self.time_in, self.head = nn.Linear(16, width), nn.Linear(width, channels * PATCH**2)
        self.layers = nn.ModuleList([Layer(heads, head_dim) for _ in range(layers)])

    def forward(self, latents, time, embeddings, counts):
        batch, channels, frames, height, width = latents.shape
        grid = frames, height // PATCH, width // PATCH
        folded = latents.unflatten(4, (-1, PATCH)).unflatten(3, (-1, PATCH))  # (batch, channels, frames, h, p, w, q)
        video = self.video_in(folded.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, math.prod(grid), -1))
        text, time = self.text_in(embeddings), self.time_in(waves(time).expand(batch, -1))
        rotary = [torch.from_numpy(table) for table in angles(grid, self.head_dim)]
        for layer in self.layers:
            video, text = layer(video, text, counts, time, rotary)
        patches = self.head(norm(video)).reshape(batch, *grid, channels, PATCH, PATCH)
        return patches.permute(0, 4, 1, 2, 5, 3, 6).reshape(latents.shape)


def waves(time):
    """(16,) of a time from 0 to 1000."""
    angle = time * 0.01 * 2.0 ** -torch.arange(8)
    return torch.cat([angle.cos(), angle.sin()])


def angles(grid, head_dim):
    """Cosines and sines (tokens, head_dim) in numpy: the token's number turns all pairs, each at its own speed."""
    places = numpy.arange(math.prod(grid))[:, None] * 2.0 ** -numpy.arange(head_dim // 2)[None]
    return [numpy.repeat(wave(places), 2, axis=1).astype("float32") for wave in (numpy.cos, numpy.sin)]


class Text(nn.Module):
    def __init__(self, width: int, vocabulary: int = 4096):
        super().__init__()
        self.table, self.mix = nn.Embedding(vocabulary, width), nn.Linear(width, width)

    def forward(self, ids):
        return self.mix(self.table(ids % self.table.num_embeddings))


class Vae(nn.Module):
    """A latent frame to two frames of pixels, the first to one; each looks at the latent frame before."""

    def __init__(self, channels: int):
        super().__init__()
        self.decoder = nn.Conv2d(2 * channels, 3 * FRAMES * SIDE**2, 1)

    def forward(self, latent, before):
        """(1, channels, 1, height, width) and the one before, None at the start: pixels (1, 3, frames, …) in -1..1."""
        first = before is None
        seen = torch.cat([latent, latent * 0 if first else before], 1)[:, :, 0]
        pixels = functional.pixel_shuffle(self.decoder(seen), SIDE).tanh().unflatten(1, (3, FRAMES))
        return pixels[:, :, -1:] if first else pixels, latent
