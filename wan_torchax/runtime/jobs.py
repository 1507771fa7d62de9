"""From a config to a Job: locates and hashes each input file once per run. Imports neither JAX nor torch."""
from collections.abc import Iterable

from wan_torchax.config import inputs
from wan_torchax.config.graph import Graph, helpers_of
from wan_torchax.config.resolve import Job
from wan_torchax.records.fingerprints import digest
from wan_torchax.runtime import adapters
from wan_torchax.runtime.checkpoint import find_all, find_present


def find_job(config) -> Job:
    """The config with those of its files that are local. Downloads nothing."""
    graph = Graph.of(config.pipeline, helpers_of(config))
    present = find_present(config, graph.components([*graph.stages, *graph.helpers]))
    files = {key: inputs.paths(config, key) for key in inputs.taken(config)}
    contents = {key: digest(paths) for key, paths in files.items() if paths}
    return Job.of(config, adapters.on(present, config, local_only=True), contents)


def with_weights(job: Job, components: Iterable[str]) -> Job:
    """The job with the checkpoints of these components, downloaded if they are not local."""
    absent = [name for name in components if name not in job.checkpoints]
    return job.with_checkpoints(adapters.on(find_all(job.config, absent), job.config)) if absent else job


def plan_job(config) -> Job:
    """A job for planning: needs no weights, only the config.json of a local checkpoint, if there is one."""
    graph = Graph.of(config.pipeline)
    return Job.of(config, find_all(config, graph.components(graph.stages), required=False))
