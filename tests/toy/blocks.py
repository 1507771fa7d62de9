"""The made-up transformer as functions of its arrays, and its other parts under JAX."""
import jax
import jax.numpy as jnp
import torch

from tests.toy import modules
from wan_torchax.kernels.attention import Attend, Beside
from wan_torchax.models.family import Forward, Output
from wan_torchax.models.loop import Blocks, pad_tokens, plain_norm, token_sharding
from wan_torchax.patches import call_module

EPSILON, PATCH = modules.EPSILON, modules.PATCH


def on_meta(kind):
    def build(architecture):
        with torch.device("meta"):
            return kind(**architecture).eval()

    return build


build, build_text, build_vae = map(on_meta, (modules.Transformer, modules.Text, modules.Vae))


def encode_text(module, arrays, ids, mask):
    return {"embeddings": call_module(module, arrays, ids), "counts": mask.sum(axis=1)}


def decoder(module, config, mesh):
    def decode(arrays, latent, before):
        return call_module(module, arrays, latent, before)

    return decode, jax.sharding.PartitionSpec()


def denoiser(module, forward: Forward):
    architecture = forward.architecture
    head_dim, width = architecture["head_dim"], architecture["heads"] * architecture["head_dim"]
    attend = Attend(
        head_dim, forward.self_attention, forward.parallel, forward.mesh, keys=forward.tokens, norm_epsilon=EPSILON,
        grid=forward.grid,
    )
    tables = modules.angles(forward.grid, head_dim)
    rotary = [pad_tokens(jnp.asarray(table)[None], forward.multiple)[0] for table in tables]

    def velocity(arrays, latents, time, conditions, residual=None) -> Output:
        latents = latents + 0.1 * conditions.get("previous", 0)
        batch, channels, frames, height, columns = latents.shape
        folded = latents.reshape(batch, channels, frames, height // PATCH, PATCH, columns // PATCH, PATCH)
        video = folded.transpose(0, 2, 3, 5, 1, 4, 6).reshape(batch, forward.tokens, -1)
        video = pad_tokens(linear(arrays, "video_in", video), forward.multiple)
        text = linear(arrays, "text_in", conditions["embeddings"])
        angle = time * 0.01 * 2.0 ** -jnp.arange(8)
        time = linear(arrays, "time_in", jnp.concatenate([jnp.cos(angle), jnp.sin(angle)])[None])
        counts = conditions["counts"].astype(jnp.int32)
        before = video = jax.lax.with_sharding_constraint(video, token_sharding(forward.mesh, forward.parallel, batch))
        if residual is None:
            blocks = Blocks.of(arrays, "layers", architecture["layers"], forward, epsilon=EPSILON)
            (video, text), _ = blocks.run(lambda layer, carry: (block(layer, carry, time, counts), None), (video, text))
        else:
            video = video + residual
        ones, zeros = jnp.ones((1, width)), jnp.zeros((1, width))
        out = linear(arrays, "head", plain_norm(video[:, : forward.tokens], ones, zeros, EPSILON))
        patches = out.reshape(batch, *forward.grid, channels, PATCH, PATCH)
        return Output(patches.transpose(0, 4, 1, 2, 5, 3, 6).reshape(latents.shape), video - before)

    def block(layer, streams, time, counts):
        names = ("", "text_")
        rows = [jnp.split(layer.linear(f"{name}modulation", jax.nn.silu(time)), 6, axis=-1) for name in names]
        normed = [layer.norm("norm", one, 1 + row[1], row[0]) for one, row in zip(streams, rows)]

        def project(stream, name):
            return layer.linear(f"attention.{names[stream]}{name}", normed[stream])

        def text_norm(name):
            heads = project(1, name).reshape(*normed[1].shape[:2], -1, head_dim)
            return by_head(heads, layer[f"attention.text_norm_{name}.weight"]).reshape(normed[1].shape)

        beside = Beside(text_norm("q"), text_norm("k"), project(1, "v"), counts)
        norms = [layer[f"attention.norm_{name}.weight"] for name in "qk"]
        outs, _ = attend.counted(*(project(0, name) for name in "qkv"), rotary, norms, beside)
        made = []
        for name, one, row, out in zip(names, streams, rows, outs):
            one = layer.linear(f"attention.{name}out", out, residual=one, gate=row[2])
            wide = layer.linear(f"{name}mlp_in", layer.norm("norm", one, 1 + row[4], row[3]), gelu=True)
            made.append(layer.linear(f"{name}mlp_out", wide, residual=one, gate=row[5]))
        return tuple(made)

    return velocity


def by_head(heads, weight):
    return heads * jax.lax.rsqrt((heads * heads).mean(-1, keepdims=True) + EPSILON) * weight


def linear(arrays, name, array):
    return jnp.einsum("...a,ba->...b", array, arrays[f"{name}.weight"]) + arrays[f"{name}.bias"]
