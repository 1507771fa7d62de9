"""Noise to latents of a character that moves as in a driving video, which is read before the first step."""
import math

import jax
import jax.numpy as jnp

from wan_torchax.config.attention import parallel_of
from wan_torchax.devices.sharding import struct
from wan_torchax.kernels.parallel import kept_spec
from wan_torchax.runtime import weights
from wan_torchax.runtime.programs import Program, own_compilation, put
from wan_torchax.stages.denoise import Denoise, width_of
from wan_torchax.stages.step import with_strengths

READ = "driving_"  # begins the names of what is read before the first step, and not taken by the steps


class Driven(Denoise):
    """Like Denoise, of models that attend to a driving video (Family.reader). What is read of it, gigabytes of keys and
    values, stays on the devices while a segment is made, heads shared as attention shares them."""

    @classmethod
    def derived(cls, name, job):
        derived, (frames, *sides) = super().derived(name, job), job.grid
        given, layers = derived["conditions"], job.config.model.architecture.transformer.num_layers
        tokens = (frames - 1) * math.prod(sides)
        return derived | {
            "conditions": {value: shape for value, shape in given.items() if not value.startswith(READ)},
            "driving": {value: shape for value, shape in given.items() if value.startswith(READ)},
            "kept_shape": (layers, 1, tokens, width_of(job.family, job.config)),
        }

    def build(self):
        super().build()
        component, empty = self.recipe.derived["uses"][0], self.kept()
        reader = self.family.reader(self.module(component), self.forward(1))

        def read(arrays, empty, driving):
            return reader(with_strengths(arrays, driving), empty, driving)

        outputs = jax.tree.map(lambda one: one.sharding, empty)
        self.add("read", Program(read, component, [empty, self.driving()], outputs, donated=(1,)))

    def arguments(self, step):
        state, schedule, conditions = super().arguments(step)
        return [state, schedule, conditions | {"driving": self.kept()}]

    def kept(self) -> dict:
        """Structs of what is read."""
        shape, dtype = self.recipe.derived["kept_shape"], self.config.model.dtype.transformer
        spec = kept_spec(self.parallel(self.recipe.derived["prompts"]), whole_batch=True)
        one = jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(self.mesh, spec))
        return {"key": one, "value": one}

    def driving(self) -> dict:
        """Structs of what it is read from, and with adapters beside the weights of their strengths."""
        conditions, dtype = self.family.conditions, self.config.model.dtype.transformer
        rank = self.components[self.recipe.derived["uses"][0]].rank
        return {
            name: struct(self.mesh, shape, dtype if conditions[name].half else "float32")
            for name, shape in self.recipe.derived["driving"].items()
        } | ({"strengths": struct(self.mesh, (rank,), "float32")} if rank else {})

    def first_arguments(self, config, table, values, draws):
        state, schedule, conditions = super().first_arguments(config, table, values, draws)
        program = self.programs.entries["read"]
        empty, driving = program.arguments
        values = values | {"strengths": self.components[program.component].strengths(0)}
        with own_compilation():  # zeros are allocated on the devices by a small program
            zeros = jax.tree.map(weights.zeros, empty)
        read = self("read", zeros, put(driving, {name: values[name] for name in driving}))
        return state, schedule, conditions | {"driving": read}

    @classmethod
    def temporaries(cls, resolved):
        """A step's, and what is kept."""
        axes, parallel = resolved.placement["axes"], parallel_of(resolved.config.sharding)
        shards = math.prod(axes.get(axis, 1) for axis in (parallel.heads, parallel.ulysses) if axis)
        item = jnp.dtype(resolved.config.model.dtype.transformer).itemsize
        layers, _, tokens, width = cls.derived("driven", resolved)["kept_shape"]
        return super().temporaries(resolved) + 2 * item * layers * tokens * width / shards
