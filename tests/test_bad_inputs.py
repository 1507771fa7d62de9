"""Mistakes on the command line and in files: told in one paragraph, with key, value and a way out, before torch loads.

The table is the test: what is typed, and what must be in the answer. {tmp} is a folder with files that have something
wrong in them.
"""
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import ROOT, make_config
from tests.fork import Server, warm
from wan_torchax.config.schema import ConfigError
from wan_torchax.config.validation import validate

# ---------------------------------------------------------------- files with something wrong in them


def make_files(folder: Path) -> None:
    """Prompts, lists, runs, videos and checkpoints; what is wrong with each is its name."""
    folder.mkdir(exist_ok=True)
    (folder / "empty").mkdir()
    texts = {
        "file": "hello", "empty.txt": "", "plain.mp4": "not a video",
        "playlist.mp4": "#EXTM3U\n#EXTINF:1,\n/etc/hostname\n",
        "bad.jsonl": "{oops\n", "self.jsonl": json.dumps({"prompt": "a", "prompts": "self.jsonl"}),
        "keys.jsonl": json.dumps({"prompt": "a", "stesp": 3}),
        "types.jsonl": json.dumps({"prompt": "a", "steps": "many"}),
        "forged.jsonl": json.dumps({"prompt": "a", "compile.xla_flags": ["--xla_dump_to=/tmp/x"]}),
        "extra.csv": "prompt,seed\na,1,2\n", "emptykey.csv": "prompt,\na,1\n", "deep.jsonl": "[" * 100_000,
        "null.jsonl": json.dumps({"prompt": None}), "number.jsonl": json.dumps({"prompt": 5}),
        "surrogate.jsonl": '{"prompt": "\\ud800"}', "nul.jsonl": '{"prompt": "a\\u0000b"}',
        "huge_seed.jsonl": json.dumps({"prompt": "a", "seed": 2**40}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin1.txt").write_bytes("café".encode("latin-1"))
    (folder / "nul.txt").write_bytes(b"a\0b")
    runs = {
        "broken_run": "a: [", "list_run": "- 1\n", "latin_run": "a: é".encode("latin-1"),
        "bomb_run": "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n",
    }
    for name, text in runs.items():
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    make_checkpoints(folder)


def make_checkpoints(folder: Path) -> None:
    """The demo model with one thing wrong."""
    demo = ROOT / "models" / "demo"
    names = (
        "broken_config", "list_config", "another", "no_config", "no_weights", "pickle", "half_weights", "unexpected",
        "integers", "no_tokenizer", "tokenizer", "vae_shape", "no_vae",
    )
    for name in names:
        shutil.copytree(demo, folder / name, copy_function=os.symlink)

    def write(path, content):
        path.unlink()
        path.write_bytes(content)

    def change(name, component, edit):
        file, = (folder / name / component).glob("*.safetensors")
        tensors = load_file(file)
        edit(tensors, next(iter(sorted(tensors))))
        file.unlink()
        save_file(tensors, file)

    write(folder / "broken_config/transformer/config.json", b"{oops")
    write(folder / "list_config/transformer/config.json", b"[1]")
    config = json.loads((demo / "transformer/config.json").read_text()) | {"num_layers": 3}
    write(folder / "another/transformer/config.json", json.dumps(config).encode())
    (folder / "no_config/vae/config.json").unlink()
    for name in ("no_weights", "pickle"):
        next((folder / name / "vae").glob("*.safetensors")).unlink()
    (folder / "pickle/vae/diffusion_pytorch_model.bin").write_bytes(b"x")
    file = next((folder / "half_weights/transformer").glob("*.safetensors"))
    write(file, file.read_bytes()[:5000])
    change("vae_shape", "vae", lambda tensors, name: tensors.update({name: numpy.zeros((3, 5), "float32")}))
    change("unexpected", "vae", lambda tensors, name: tensors.update({"nobody.knows": numpy.zeros(3, "float32")}))
    change("integers", "vae", lambda tensors, name: tensors.update({name: tensors[name].astype("int8")}))
    shutil.rmtree(folder / "no_tokenizer/tokenizer")
    write(folder / "tokenizer/tokenizer/tokenizer.json", b"{oops")
    shutil.rmtree(folder / "no_vae/vae")


# ---------------------------------------------------------------- what is typed, and what is said


TABLE = r"""
sed=7  =>  sed: no such key or group; nearest: seed
seed=-1  =>  seed=-1: must be from 0 to 4294967295; 4294967295 gives the same noise
seed=4294967296  =>  seed=4294967296: must be from 0 to 4294967295; 0 gives the same noise
seed=abc  =>  seed=abc: must be a whole number
seed=null  =>  seed: must be something; null is not allowed here
seed=  =>  seed=: must be a whole number
steps=0  =>  steps=0: must be from 1 to 1000; nearest 1
steps=1001  =>  steps=1001: must be from 1 to 1000; nearest 1000
steps=abc  =>  steps=abc: must be a whole number
guidance_scale=-1  =>  guidance_scale=-1.0: must be from 0 to 20; usual 4.0 (up to 1 there is none)
guidance_scale=nan  =>  guidance_scale=nan: must be from 0 to 20; usual 4.0 (up to 1 there is none)
guidance_scale=abc  =>  guidance_scale=abc: must be a number
guidance=none  =>  guidance=none: unknown; one of: batched, sequential
guidance=Batched  =>  guidance=Batched: unknown; nearest: batched
guidence=batched  =>  guidence: no such key or group; nearest: guidance
keep_resident=perhaps  =>  keep_resident=perhaps: must be true or false
preview_every=-1  =>  preview_every=-1: a number of steps; 0 for no previews
preview_every=x  =>  preview_every=x: must be a whole number
task=genrate  =>  task=genrate: unknown; nearest: generate
task=  =>  task=: unknown; one of: generate, plan, tune, presets
stages=[]  =>  stages=[]: name at least one of text, denoise, decode
stages=[txt]  =>  stages=txt: unknown; nearest: text
stages=[denoise,text]  =>  stages=['denoise', 'text']: each once and in order; nearest [text,denoise]
stages=[text,decode]  =>  stages=['text', 'decode']: decode takes latents, which denoise gives; add denoise to
stages=[denoise]  =>  stages=['denoise']: denoise takes embeddings, which text gives; add text to stages, or
stages=text  =>  stages: must be a list, e.g. [one,two]
stages=[text,denoise,decode,upscale]  =>  stages=upscale: unknown; one of: text, denoise, decode
resolution=481p  =>  resolution=481p: no such option; nearest: 480p
resolution=4k  =>  resolution=4k: no such option; one of:
resolution.height=50  =>  resolution.height=50: must be a multiple of 16; nearest 48 or 64
resolution.height=0  =>  resolution.height=0: demo takes 64 to 256; nearest 64
resolution.height=4096  =>  resolution.height=4096: demo takes 64 to 256; nearest 256
resolution.height=abc  =>  resolution.height=abc: must be a whole number
resolution.height=null  =>  resolution.height: must be something; null is not allowed here
resolution.width=130  =>  resolution.width=130: must be a multiple of 16; nearest 128 or 144
resolution.width=10000000000000  =>  resolution.width=10000000000000: demo takes 64 to 256; nearest 256
resolution.frames=0  =>  resolution.frames=0: must be 4n+1; nearest 1 or 5
resolution.frames=16  =>  resolution.frames=16: must be 4n+1; nearest 13 or 17
resolution.frames=1001  =>  resolution.frames=1001: demo takes at most 81
resolution.frames=abc  =>  resolution.frames=abc: must be a whole number
resolution.fps=0  =>  resolution.fps=0: must be from 1 to 120; usual 16
resolution.fps=x  =>  resolution.fps=x: must be a whole number
resolution.flow_shift=0  =>  resolution.flow_shift=0.0: must be above 0 and at most 50; usual 3.0 (480p) or 5.0 (720p)
resolution.flow_shift=nan  =>  resolution.flow_shift=nan: must be above 0 and at most 50; usual 3.0 (480p) or 5.0
resolution.depth=3  =>  resolution.depth: no such key or group; nearest: resolution.width
model=wan  =>  model=wan: no such option; one of:
model=wan21_t2v_5b  =>  model=wan21_t2v_5b: no such option; nearest:
model=  =>  model=: no such option; one of:
model.path=/no/such/folder  =>  model.path=/no/such/folder: neither a local folder nor a repository on the Hub that
model.path=no-such  =>  model.path=no-such: the Hub cannot be reached and text_encoder is not in the local cache;
model.path=  =>  model.path=: no folder text_encoder/; a checkpoint in diffusers layout has text_encoder, tokenizer,
model.path={tmp}/empty  =>  model.path={tmp}/empty: no folder text_encoder/; a checkpoint in diffusers layout has
model.path={tmp}/file  =>  model.path={tmp}/file: neither a local folder nor a repository on the Hub that you can read
model.path={tmp}/broken_config  =>  {tmp}/broken_config/transformer: no readable config.json (Expecting property name
model.path={tmp}/another  =>  num_layers: 3 in the checkpoint, 6 in the config
model.path={tmp}/no_weights  =>  {tmp}/no_weights/vae: no .safetensors files
model.path={tmp}/pickle  =>  {tmp}/pickle/vae: no .safetensors files (diffusion_pytorch_model.bin can run code when
model.path={tmp}/half_weights  =>  {tmp}/half_weights/transformer/diffusion_pytorch_model.safetensors: not a readable
model.path={tmp}/no_tokenizer  =>  model.path={tmp}/no_tokenizer: no folder tokenizer/; a checkpoint in diffusers
model.path={tmp}/tokenizer  =>  {tmp}/tokenizer/tokenizer/tokenizer.json: not a whole JSON file; download it again
model.text_tokens=0  =>  model.text_tokens=0: must be from 1 to 8192; usual 512
model.text_tokens=100000  =>  model.text_tokens=100000: must be from 1 to 8192; usual 512
model.dtype.vae=float8  =>  model.dtype.vae=float8: unknown; nearest: float32
model.dtype.transformer=bf16  =>  model.dtype.transformer=bf16: unknown; nearest: bfloat16
model.dtype.text_encoder=int8  =>  model.dtype.text_encoder=int8: unknown; one of:
model.dtype.decoder=float32  =>  model.dtype.decoder: no such key or group; nearest: model.dtype
model.architecture.transformer.num_layers=7  =>  num_layers: 6 in the checkpoint, 7 in the config
model.architecture.vae.z_dim=99  =>  pipeline=t2v: gives the transformer 99 channels, and demo takes 16
model.revison=main  =>  model.revison: no such key or group; nearest: model.revision
mesh=v6e  =>  mesh=v6e: no such option; nearest: v6e_8
mesh=v6e_16  =>  mesh=v6e_16: has 4 hosts, and distributed=none is one process; set distributed=auto, and run the
mesh.axes.dp=0  =>  mesh.axes.dp=0: must be at least 1, or -1 for whatever devices remain; nearest 1
mesh.axes.tp=-2  =>  mesh.axes.tp=-2: must be at least 1, or -1 for whatever devices remain; nearest 1
mesh.axes.dp=-1 mesh.axes.tp=-1  =>  mesh.axes: only one axis may be -1, not dp and tp
mesh.axes.qp=2  =>  mesh.axes.qp: no such key or group; nearest: mesh.axes
mesh.platform=npu  =>  mesh.platform=npu: unknown; nearest: tpu
mesh.hosts=0  =>  mesh.hosts=0: must be at least 1 and divide the number of devices
mesh.hosts=3 mesh=v6e_8  =>  mesh.hosts=3: must be at least 1 and divide the 8 devices of mesh.axes
mesh.chip.topology=v6e:2x4 task=plan mesh=v6e_1  =>  mesh.chip.topology=v6e:2x4: has 8 chips, mesh.axes make 1; make
mesh.xla_flags=--xla_foo  =>  mesh.xla_flags: must be a list, e.g. [one,two]
distributed=yes  =>  distributed=yes: no such option; one of: auto, none
distributed=auto  =>  distributed=auto: this is no Cloud TPU, GKE or Slurm job that JAX knows; set
distributed.join_seconds=0  =>  distributed.join_seconds=0: must be from 1 to 86400; nearest 1
distributed.lost_seconds=1  =>  distributed.lost_seconds=1: must be from 5 to 3600; nearest 5
distributed=auto distributed.coordinator=nowhere distributed.processes=2 distributed.process=0  =>  distributed.coordinator=nowhere: write
distributed=auto distributed.coordinator=localhost:99 distributed.processes=2 distributed.process=2  =>  distributed.process=2: must be from 0
distributed=auto distributed.coordinator=localhost:99 distributed.processes=2  =>  distributed=auto: this is no Cloud TPU,
sharding=sequnce  =>  sharding=sequnce: no such option; nearest: sequence
sharding.axes.heads=zz  =>  sharding.axes.heads: the mesh has no axis 'zz'; one of: dp, sp, tp
sharding.axes.heads=[tp,tp]  =>  sharding.axes.heads=[['tp', 'tp']]: an axis may shard one dimension only
sharding.axes.heads=1  =>  sharding.axes.heads=[1]: each entry must be an axis name, a list of axis names, or null
sharding.axes.head=tp  =>  sharding.axes.head: no such key or group; nearest: sharding.axes
sharding.gather=dp  =>  sharding.gather=dp: heads and mlp of sharding.axes share the blocks' weights already
sharding.attention.batch=zz  =>  sharding.attention.batch: the mesh has no axis 'zz'; one of: dp, sp, tp
sharding.attention.ring=q  =>  sharding.attention.ring: the mesh has no axis 'q'; one of: dp, sp, tp
sharding.picture=[null,null,null,zz,null]  =>  sharding.picture: the mesh has no axis 'zz'; one of: dp, sp, tp
mesh=cpu_8 sharding=sequence mesh.axes={dp:1,sp:3,tp:1}  =>  sharding.attention.ulysses=sp (size 3): 8 heads do not divide
model.weights.transformer.attention_out.axes=[zz]  =>  zz is no name of sharding.axes; one of: heads, mlp, encoder
model.weights.transformer.attention_out.axes=[mlp,mlp]  =>  each name of sharding.axes at most once
model.weights.transformer.attention_out.axes=[1]  =>  1 is no name of sharding.axes
model.weights.transformer.attention_out.pattern=(  =>  model.weights.transformer.attention_out.pattern=(: Error
model.weights.transformer.attention_oot.axes=[heads]  =>  model.weights.transformer.attention_oot: no such key or
+model.weights.transformer.mine={pattern:'blocks.0.*'}  =>  model.weights.transformer.mine={'pattern':
attention=spash  =>  attention=spash: no such option; nearest: splash_v7x
attention=cudnn  =>  attention.self.kernel=cudnn: takes bfloat16, and model.dtype.transformer=float32; set that to
attention=hopper  =>  attention.self.kernel=hopper: serves head dims 64 and 128, the model has 32; use kernel=xla
attention=splash_v6e  =>  attention.self.kernel=splash: serves head dims 64 and 128, the model has 32; use kernel=xla
attention.self.kernel=flash  =>  attention.self.kernel=flash: unknown; nearest: splash
attention.self.kernel=splash  =>  attention.self.kernel=splash: serves head dims 64 and 128, the model has 32; use
attention.self.block_q=0  =>  attention.self.block_q=0: kernel=auto brings its own; name the kernel's file, e.g.
attention.self.block_q=-512  =>  attention.self.block_q=-512: kernel=auto brings its own; name the kernel's file,
attention.self.block_kv=100 attention=splash_v6e model.dtype.transformer=bfloat16  =>  attention.self.kernel=splash: serves
attention.self.block_q=x  =>  attention.self.block_q=x: must be a whole number
attention.self.window=-1  =>  attention.self.window=-1: how many tokens away a key may be; null for all
attention.self.widow=5  =>  attention.self.widow: no such key or group; nearest: attention.self.window
attention.cross.window=5  =>  attention.cross.window=5: text and video have no common positions; set null
ops=all  =>  ops=all: no such option; nearest: default
ops.conv3d.op=conv3d  =>  ops.conv3d.op=conv3d: write it as aten.<op>[.<overload>] or torch.<function>
ops.conv3d.implementation=os.system  =>  ops.conv3d.implementation=os.system: not in patches or kernels; set
ops.conv3d.platforms=[npu]  =>  ops.conv3d.platforms=npu: unknown; nearest: tpu
ops.conv3d=1  =>  ops.conv3d=1: needs op, implementation and why, may have platforms; see conf/ops/default.yaml
+ops.mine={op:aten.add}  =>  ops.mine={'op': 'aten.add'}: needs op, implementation and why, may have platforms; see
+ops.mine={op:aten.add,implementation:os.system,why:x}  =>  ops.mine.implementation=os.system: not in patches or
+ops.mine={op:x.y,implementation:patches.conv,why:x}  =>  ops.mine.op=x.y: write it as aten.<op>[.<overload>] or
~ops.none  =>  ~ops.none: there is no such key to remove; nearest: ops
scheduler=heun  =>  scheduler=heun: no such option; nearest: unipc
scheduler.target=DDPMScheduler  =>  scheduler.target=DDPMScheduler: unknown; nearest: DEISMultistepScheduler
scheduler.target=os.system  =>  scheduler.target=os.system: unknown; one of:
scheduler.target=  =>  scheduler.target=: unknown; one of:
scheduler.arguments=5  =>  scheduler.arguments: must be a mapping, e.g. {name: value}
prompt=a prompt.file={tmp}/one.txt  =>  prompt.text and prompt.file: both are given; leave one of them out
prompt.file=/no/such/file  =>  prompt.file=/no/such/file: no such file
prompt.file={tmp}/latin1.txt  =>  prompt.file={tmp}/latin1.txt: not UTF-8 text; convert it
prompt.file={tmp}  =>  prompt.file={tmp}: no such file
prompt.file={tmp}/nul.txt  =>  prompt.file={tmp}/nul.txt: has a NUL character in it; leave it out
prompt.negative_file=/no/such/file  =>  prompt.negative_file=/no/such/file: no such file
prompt.txt=hello  =>  prompt.txt: no such key or group; nearest: prompt.text
prompts=/no/such.txt  =>  prompts=/no/such.txt: cannot be read as UTF-8 text ([Errno 2] No such file or directory:
prompts=/no/such.doc  =>  prompts=/no/such.doc: unknown kind of file; use .txt (a prompt a line), .csv or .jsonl
prompts={tmp}  =>  prompts={tmp}: unknown kind of file; use .txt (a prompt a line), .csv or .jsonl
prompts=[oops  =>  prompts=[oops: not a JSON list (Expecting value: line 1 column 2 (char 1)); write
prompts=[]  =>  prompts=[]: holds no prompt; write one a line
prompts={tmp}/empty.txt  =>  prompts={tmp}/empty.txt: holds no prompt; write one a line
prompts={tmp}/latin1.txt  =>  : cannot be read as UTF-8 text ('utf-8' codec can't decode byte
prompts={tmp}/bad.jsonl  =>  line 1: not JSON (Expecting property name enclosed in double quotes: line 1 column 2
prompts={tmp}/self.jsonl  =>  line 1: prompts: may only be given on the command line; skipped
prompts={tmp}/keys.jsonl  =>  line 1: stesp: no such key; nearest: steps; skipped
prompts={tmp}/forged.jsonl  =>  line 1: compile.xla_flags: may only be given on the command line; skipped
prompts={tmp}/types.jsonl  =>  line 1: steps=many: must be a whole number; skipped
prompts={tmp}/extra.csv  =>  line 2: more fields than the header has (['2']); skipped
prompts={tmp}/emptykey.csv  =>  line 2: '': no such key; one of:
prompts={tmp}/deep.jsonl  =>  line 1: not JSON (maximum recursion depth exceeded while decoding a JSON array from a
prompts=["a"] seeds=x  =>  seeds=x: how many (from 1 to 100000), or a list such as seeds=[1,2,3]
seeds=0  =>  seeds=0: how many (from 1 to 100000), or a list such as seeds=[1,2,3]
seeds=-1  =>  seeds=-1: how many (from 1 to 100000), or a list such as seeds=[1,2,3]
seeds=99999999999  =>  seeds=99999999999: how many (from 1 to 100000), or a list such as seeds=[1,2,3]
seeds=[]  =>  seeds=[]: how many (from 1 to 100000), or a list such as seeds=[1,2,3]
seeds=[1.5]  =>  seeds=[1.5]: how many (from 1 to 100000), or a list such as seeds=[1,2,3]
seeds=[-1]  =>  seed=-1: must be from 0 to 4294967295; 4294967295 gives the same noise
shard=0/3  =>  shard=0/3: there is no list to take a share of; give prompts=<file> or seeds=<how many>
seeds=2 shard=3  =>  shard=3: write part/parts, e.g. shard=3/12
seeds=2 shard=4/3  =>  shard=4/3: the part must be from 1 to 3
seeds=2 shard=a/b  =>  shard=a/b: write part/parts, e.g. shard=3/12
seeds=2 shard=1/0  =>  shard=1/0: the part must be from 1 to 1
resume=/no/such  =>  resume=/no/such: no such run folder; runs are under outputs/<date>/<time>
resume={tmp}/empty  =>  resume={tmp}/empty: not a run folder (it has no config.yaml); runs are under
resume={tmp}/broken_run  =>  {tmp}/broken_run/config.yaml: cannot be read (while parsing a flow node); runs write it
resume={tmp}/bomb_run  =>  {tmp}/bomb_run/config.yaml: cannot be read (it has aliases); runs write it whole
resume={tmp}/list_run  =>  {tmp}/list_run/config.yaml: not a mapping of keys to values
resume={tmp}/empty replay={tmp}/empty  =>  resume={tmp}/empty and replay={tmp}/empty: give one of the two
replay=/no/such  =>  replay=/no/such: no such run folder or video; runs are under outputs/<date>/<time>
replay={tmp}/empty  =>  replay={tmp}/empty: not a run folder (it has no config.yaml); runs are under
replay={tmp}/playlist.mp4  =>  replay={tmp}/playlist.mp4: carries no settings; give a run folder, or a video made by
replay={tmp}/plain.mp4  =>  replay={tmp}/plain.mp4: carries no settings; give a run folder, or a video made by this
replay={tmp}/broken_run  =>  {tmp}/broken_run/config.yaml: cannot be read (while parsing a flow node); runs write it
preset=t2v  =>  preset=t2v: no such option; one of:
preset=t2v_demo_128_cpu_v3  =>  preset=t2v_demo_128_cpu_v3: no such option; nearest: t2v_demo_128_cpu_v2
pipeline=i2x  =>  pipeline=i2x: no such option; nearest: i2v
pipeline.stages.text.takes=[nothing]  =>  pipeline.stages.text.takes=nothing: neither an input nor given by a stage
pipeline.stages.text.uses=[brain]  =>  pipeline.stages.text.uses=brain: unknown; one of:
pipeline.stages.text.gives=[latents]  =>  pipeline.stages.denoise.takes=embeddings: neither an input nor given by a
pipeline.inputs.prompt=prompt.txt  =>  pipeline.inputs.prompt=prompt.txt: no such key in the config
+pipeline.stages.upscale={takes:[frames],gives:[big]}  =>  upscale: Invalid type assigned: dict is not a subclass of
compile.matmul_precision=best  =>  compile.matmul_precision=best: unknown; nearest: highest
compile.xla_flag=[]  =>  compile.xla_flag: no such key or group; nearest: compile.xla_flags
compile.xla_flags=5  =>  compile.xla_flags: must be a list, e.g. [one,two]
output.quality=52  =>  output.quality=52: an H.264 CRF from 0 (lossless) to 51; usual 18
output.quality=x  =>  output.quality=x: must be a whole number
output.qualty=5  =>  output.qualty: no such key or group; nearest: output.quality
plan.compiler=/nonexistent task=plan mesh=v6e_8  =>  plan.compiler=/nonexistent: no such program; a Python that has
task=plan  =>  mesh=auto: a plan needs a mesh that names its chip; e.g. mesh=v6e_8 or mesh=gpu_1
task=plan mesh=v6e_8 plan.margin_gib=-1  =>  plan.margin_gib=-1.0: must not be negative
task=plan mesh=v6e_8 mesh.chip.self_attention_share=2  =>  mesh.chip.self_attention_share=2.0: a share of peak, above 0 and at
task=plan mesh=v6e_8 mesh.chip.self_attention_share=0  =>  mesh.chip.self_attention_share=0.0: a share of peak, above 0 and at
task=plan mesh=v6e_8 plan.likely.xla=-1  =>  plan.likely.xla=-1.0: must not be negative, and only launch_us 0
task=tune tune.search=[]  =>  tune.search=[]: name at least one key and its values
task=tune tune.search=[nothing]  =>  tune.search: no key nothing; e.g. attention.self.block_q=512,1024
task=tune tune.search=[stepz=1]  =>  tune.search=[stepz=1]: no viable alternative at input '[stepz='; put quotes
task=tune tune.repeats=0  =>  tune.repeats=0: must be at least 1; usual 5
tune.search=[steps=]  =>  tune.search=[steps=]: no viable alternative at input '[steps='; put quotes around the
+foo=1  =>  foo: no such key; one of:
+model.foo=1  =>  model.foo: no such key; one of:
~seed  =>  seed: no such key or group; nearest: seed
~foo  =>  ~foo: there is no such key to remove; one of:
foo=1  =>  foo: no such key or group; one of:
=5  =>  =5: no key before the =; write key=value
seed=[1,2  =>  seed=[1,2: no viable alternative at input '[1,2'; put quotes around the value: 'key="value"'
seed={a:1}  =>  seed={'a': 1}: must be a whole number
a=b=c  =>  a=b=c: mismatched input '=' expecting <EOF>; put quotes around the value: 'key="value"'
model@x=demo  =>  Could not override 'model@x'. Did you mean to override model?
hydra/launcher=nothing  =>  hydra/launcher=nothing: no such option; one of: ray_cluster, slurm, workers
hydra/job_logging=nothing  =>  hydra/job_logging=nothing: no such option; one of: wan
model.path={tmp}/list_config  =>  {tmp}/list_config/transformer: no readable config.json (it is no mapping of names
model.path={tmp}/no_config  =>  {tmp}/no_config/vae: no readable config.json ([Errno 2] No such file or directory:
model.path={tmp}/no_vae  =>  model.path={tmp}/no_vae: no folder vae/; a checkpoint in diffusers layout has
prompts={tmp}/null.jsonl  =>  line 1: no prompt; skipped
prompts={tmp}/surrogate.jsonl  =>  prompt: has half a character in it (a lone surrogate); leave it out
prompts={tmp}/nul.jsonl  =>  prompt: has a NUL character in it; leave it out
prompts={tmp}/huge_seed.jsonl  =>  seed=1099511627776: must be from 0 to 4294967295; 0 gives the same noise
resume={tmp}/latin_run  =>  {tmp}/latin_run/config.yaml: cannot be read ('utf-8' codec can't decode byte 0xe9 in
-m seed=  =>  seed=: must be a whole number
hydra.run.dir=  =>  hydra.run.dir=: a run needs a folder of its own, e.g. hydra.run.dir=outputs/first
model.dtype.vae=  =>  model.dtype.vae=: unknown; one of:
resolution.frames=  =>  resolution.frames=: must be a whole number
replay={tmp}/latin_run  =>  {tmp}/latin_run/config.yaml: cannot be read ('utf-8' codec can't decode byte 0xe9 in
output.keep_frames=maybe  =>  output.keep_frames=maybe: must be true or false
model=wan22_animate_14b resolution=720p  =>  image: missing; pipeline=animate starts from it: image=photo.jpg
model=wan22_animate_14b resolution=720p image=docs/demo.png  =>  pose: missing; pipeline=animate starts from it: pose=pose.mp4, skeletons on black, frame by frame
model=wan22_animate_14b resolution=720p image=docs/demo.png  =>  face: missing; pipeline=animate starts from it: face=face.mp4, that person's face, square, in the
model=wan22_animate_14b resolution=720p pipeline=replace  =>  background: missing; pipeline=replace starts from it: background=background.mp4, the video in which
model=wan22_animate_14b resolution=720p pipeline=replace  =>  mask: missing; pipeline=replace starts from it: mask=mask.mp4
model=wan22_animate_14b resolution=720p background=docs/demo.gif  =>  background=docs/demo.gif: pipeline=animate takes no such file; choose a model or pipeline
model=wan22_animate_14b resolution=720p mask=docs/demo.gif  =>  mask=docs/demo.gif: pipeline=animate takes no such file; choose a model or pipeline that does
model=wan22_animate_14b resolution=720p pose=docs/demo.png  =>  pose=docs/demo.png: not a video that ffmpeg reads
model=wan22_animate_14b resolution=720p pose=/no/such.mp4  =>  pose=/no/such.mp4: no such file
model=wan22_animate_14b resolution=720p face=README.md  =>  face=README.md: not a video that ffmpeg reads
model=wan22_animate_14b resolution=720p pose=docs/demo.gif resolution.frames=5000  =>  frames at 16 per second, fewer than resolution.frames=5000; use resolution.frames=
model=wan22_animate_14b resolution=720p resolution.frames=0  =>  resolution.frames=0: must be 4n+1; nearest 1
model=wan22_animate_14b resolution=720p pipeline.segments.frames=76  =>  pipeline.segments.frames=76: must be 4n+1; nearest 73 or 77
model=wan22_animate_14b resolution=720p pipeline.segments.overlap=77  =>  pipeline.segments.overlap=77: must be from 0 to 76
model=wan22_animate_14b resolution=720p pipeline.segments.carry.previous=nothing  =>  pipeline.segments.carry.previous=nothing: unknown; one of:
task=plan mesh=gpu_1 model=wan22_animate_14b resolution=720p pipeline=i2v_clip  =>  model=wan22_animate_14b wants a pose and a face, and pipeline=i2v_clip gives none; use pipeline=animate
task=plan mesh=gpu_1 model=wan21_i2v_14b_720p resolution=720p pipeline=animate  =>  model=wan21_i2v_14b_720p has no use for a pose and a face, which
task=plan mesh=gpu_1 model=wan22_animate_14b  =>  resolution: there is no picture to derive height and width from; give image=photo.jpg, video=clip.mp4 or
task=plan mesh=gpu_1 model=wan22_animate_14b resolution=720p model.architecture.transformer.inject_face_latents_blocks=7  =>  inject_face_latents_blocks=7: must divide the 40 blocks
pose=docs/demo.gif  =>  pose=docs/demo.gif: pipeline=t2v takes no such file; choose a model or pipeline that does
model=wan22_fun_control_a14b resolution=720p  =>  video: missing; pipeline=fun_control starts from it: video=clip.mp4
model=wan22_fun_control_5b resolution=704p video=docs/demo.gif references=[docs/demo.png,docs/demo.png] mesh=gpu_1 task=plan  =>  references: 2 pictures; model=wan22_fun_control_5b takes one
model=wan22_fun_control_a14b resolution=720p mask=docs/demo.gif  =>  mask=docs/demo.gif: pipeline=fun_control takes no such file; choose a model or pipeline
model=wan22_fun_control_5b resolution=720p  =>  resolution.height=720: must be a multiple of 32; nearest 704 or 736
task=plan mesh=gpu_1 model=wan22_fun_control_5b resolution=704p pipeline=fun_control  =>  pipeline=fun_control: model=wan22_fun_control_5b holds its first latent frame; use pipeline=fun_control_5b
task=plan mesh=gpu_1 model=wan22_fun_camera_a14b resolution=720p pipeline=fun_camera_5b  =>  pipeline=fun_camera_5b: model=wan22_fun_camera_a14b does not hold its first latent frame; use pipeline=fun_camera
task=plan mesh=gpu_1 model=wan22_fun_control_a14b resolution=720p pipeline=i2v  =>  model=wan22_fun_control_a14b wants a control video, and pipeline=i2v gives none; use pipeline=fun_control
task=plan mesh=gpu_1 model=wan22_i2v_a14b resolution=720p pipeline=fun_control  =>  model=wan22_i2v_a14b has no use for a control video, which pipeline=fun_control gives; use model=wan22_fun_control_a14b
task=plan mesh=gpu_1 model=wan22_i2v_a14b resolution=720p pipeline=fun_camera  =>  model=wan22_i2v_a14b has no use for a camera's path, which pipeline=fun_camera gives; use model=wan22_fun_camera_a14b
task=plan mesh=gpu_1 model=wan22_fun_camera_a14b resolution=720p pipeline=i2v  =>  model=wan22_fun_camera_a14b wants a camera's path, and pipeline=i2v gives none; use pipeline=fun_camera
model=wan22_fun_camera_a14b resolution=720p image=docs/demo.png  =>  camera: missing; pipeline=fun_camera follows its path: camera=zoom_in; moves are static, pan_left
model=wan22_fun_camera_a14b resolution=720p image=docs/demo.png camera=zoom_inn  =>  camera=zoom_inn: unknown; nearest: zoom_in; all: static
model=wan22_fun_camera_a14b resolution=720p image=docs/demo.png camera=[pan_left,fly+zoom_in]  =>  camera=fly: unknown; one of: static, pan_left
model=wan22_fun_camera_a14b resolution=720p image=docs/demo.png camera=zoom_in*99  =>  camera=zoom_in*99: a speed of at most 10
model=wan22_fun_camera_a14b resolution=720p image=docs/demo.png camera=[zoom_in,zoom_in] resolution.frames=1  =>  camera: 2 moves, one after the other; at most 1
model=wan22_s2v_14b resolution=704p  =>  image: missing; pipeline=s2v starts from it: image=photo.jpg
model=wan22_s2v_14b resolution=704p image=docs/demo.png  =>  audio: missing; pipeline=s2v starts from it: audio=speech.wav
model=wan22_s2v_14b resolution=704p image=docs/demo.png audio=/no/such.wav  =>  audio=/no/such.wav: no such file
model=wan22_s2v_14b resolution=704p image=docs/demo.png audio=README.md  =>  audio=README.md: not a sound that ffmpeg reads
model=wan22_s2v_14b resolution=704p image=docs/demo.png audio=docs/demo.gif  =>  audio=docs/demo.gif: not a sound that ffmpeg reads (it has no sound); save it as WAV, MP3 or MP4
task=plan mesh=gpu_1 model=wan22_s2v_14b resolution=720p  =>  resolution.height=720: must be a multiple of 64 for model=wan22_s2v_14b; nearest 704 or 768
model=wan22_s2v_14b resolution=704p face=docs/demo.gif  =>  face=docs/demo.gif: pipeline=s2v takes no such file; choose a model or pipeline
model=wan22_s2v_14b resolution=704p pipeline.segments.frames=81  =>  pipeline.segments.frames=81: must be 4n; nearest 80 or 84
model=wan22_s2v_14b resolution=704p pipeline.segments.dropped=80  =>  pipeline.segments.dropped=80: must be from 0 to 79
task=plan mesh=gpu_1 model=wan22_s2v_14b  =>  resolution: there is no picture to derive height and width from; give image=photo.jpg, video=clip.mp4 or
task=plan mesh=gpu_1 model=wan22_s2v_14b resolution=704p pipeline.segments.remembered=72  =>  pipeline.segments.remembered=72: model=wan22_s2v_14b goes on from 73 frames; set it to that
task=plan mesh=gpu_1 model=wan22_s2v_14b resolution=704p pipeline=t2v  =>  model=wan22_s2v_14b wants a sound, and pipeline=t2v gives none; use pipeline=s2v
audio=docs/demo.gif  =>  audio=docs/demo.gif: pipeline=t2v takes no such file; choose a model or pipeline that does
camera=zoom_in  =>  camera=[zoom_in]: pipeline=t2v moves no camera; use model=wan22_fun_camera_a14b or wan22_fun_camera_5b
pipeline=animate  =>  model.dtype.image_encoder: missing; one of: float32, bfloat16, float16
model=wan22_animate2_14b resolution=720p  =>  image: missing; pipeline=animate2 starts from it: image=photo.jpg
model=wan22_animate2_14b resolution=720p image=docs/demo.png  =>  video: missing; pipeline=animate2 starts from it: video=clip.mp4
model=wan22_animate2_14b resolution=720p image=docs/demo.png video=docs/demo.png  =>  video=docs/demo.png: not a video that ffmpeg reads
model=wan22_animate2_14b resolution=720p video=/no/such.mp4  =>  video=/no/such.mp4: no such file
model=wan22_animate2_14b resolution=720p video=README.md  =>  video=README.md: not a video that ffmpeg reads
model=wan22_animate2_14b resolution=720p video=docs/demo.gif resolution.frames=5000  =>  frames at 16 per second, fewer than resolution.frames=5000; use resolution.frames=
model=wan22_animate2_14b resolution=720p pose=docs/demo.gif  =>  pose=docs/demo.gif: pipeline=animate2 takes no such file; choose a model or pipeline
model=wan22_animate2_14b resolution=720p mask=docs/demo.gif  =>  mask=docs/demo.gif: pipeline=animate2 takes no such file; choose a model or pipeline
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p model.driving_prompt=null  =>  driving_prompt: missing, and model=wan22_animate2_14b has none; say what
model=wan22_animate2_14b resolution=720p guidance_scale=1  =>  guider=animate2: combines prompt and negative prompt, and guidance_scale=1.0 is none; use guider=cfg
model=wan22_animate2_14b resolution=720p guider.skip_layers=[40]  =>  guider.skip_layers=[40]: wan22_animate2_14b has layers 0 to 39; nearest 39
model=wan22_animate2_14b resolution=720p pipeline.segments.frames=80  =>  pipeline.segments.frames=80: must be 4n+1; nearest 77 or 81
task=plan mesh=gpu_1 model=wan22_animate2_14b  =>  resolution: there is no picture to derive height and width from; give image=photo.jpg, video=clip.mp4 or
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p pipeline=i2v_clip  =>  model=wan22_animate2_14b wants a driving video, and pipeline=i2v_clip gives none; use pipeline=animate2
task=plan mesh=gpu_1 model=wan21_i2v_14b_720p resolution=720p pipeline=animate2  =>  model=wan21_i2v_14b_720p has no use for a driving video, which
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p model.architecture.transformer.refer_stride=2  =>  refer_stride=2: frames that are skipped are not there; set 1
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p sharding=ring  =>  sharding.attention.ring=sp: a frame attends to its own of the driving video, and a ring cuts
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p attention=xla attention.self.window=5  =>  attention.self.window=5: the model attends to other tokens besides its video's
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p attention=xla attention.self.smooth_keys=true  =>  attention.self.smooth_keys=true: the model attends to other tokens besides its video's
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p attention=hopper attention.self.eight_bits=true  =>  attention.self.eight_bits=true: the model attends to other tokens besides its video's
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p windows=static  =>  windows=static:
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p attention=xla sparse=radial  =>  sparse=radial: lists name keys of one video, and model=wan22_animate2_14b attends to two
task=plan mesh=gpu_1 model=wan22_animate2_14b resolution=720p live=longlive  =>  live=longlive: pipeline=animate2 makes a video in one piece; use pipeline=live, or live=none
driving_prompt=x  =>  driving_prompt: pipeline=t2v has no driving video to describe; leave it out
model=wan21_vace_14b resolution=720p driving_prompt=x  =>  driving_prompt: pipeline=vace has no driving video to describe; leave it out
prompt_ref=x  =>  driving_prompt
driving_video=x.mp4  =>  video
"""
# These are told by what a device or the model itself says, so later, but before any stage runs.
LATER_TABLE = r"""
mesh=v6e_8  =>  mesh=v6e_8: no tpu to be had here
mesh.axes={dp:9,sp:1,tp:1} sharding.picture=[]  =>  axes dp=9 x sp=1 x tp=1, and this machine has 1 device (cpu); change mesh.axes
model.path={tmp}/vae_shape  =>  decoder.conv_in.bias: shape (3, 5) in the checkpoint, (64,) in the model
model.weights.transformer.attention_out.pattern=nothing  =>  pattern 'nothing' matches nothing; one of: scale_shift
preview_every=5 stages=[text]  =>  preview_every=5: previews need the decoder
"""


def rows(table: str) -> list[tuple[str, ...]]:
    return [tuple(line.split("  =>  ")) for line in table.strip().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function that runs run.py with what is typed: in a fork, which spares its start."""
    folder = tmp_path_factory.mktemp("bad")
    make_files(folder / "files")
    light = Server()

    def run(typed: str, server=light):
        arguments = [argument.replace("{tmp}", str(folder / "files")) for argument in split(typed)]
        place = "sweep" if "-m" in arguments else "run"
        if not typed.startswith("hydra.run"):
            arguments.append(f"hydra.{place}.dir={folder / 'out'}")
        answer = server.run(arguments, {"HOME": str(folder)})
        return answer, answer.output.replace(str(folder / "files"), "{tmp}")

    yield run
    light.close()


def split(typed: str) -> list[str]:
    return shlex.split(typed) if "'" in typed else typed.split(" ")


def test_the_table_is_long():
    assert len(set(rows(TABLE))) >= 200


def by_config(row) -> bool:
    """Whether composing and checking the config tells it; every twentieth of these is run all the same."""
    aside = ("-m", "hydra", "model.path", "model.architecture", "prompts=", "seeds=", "resume=", "replay=", "distributed=auto", "~")
    return not row[0].startswith(aside) and "{tmp}" not in row[0]


CONFIGURED = [row for row in rows(TABLE) if by_config(row)]
RUN = [row for row in rows(TABLE) if not by_config(row)] + CONFIGURED[::20]
RUN = [pytest.param(*row, marks=pytest.mark.full if place % 2 else ()) for place, row in enumerate(RUN)]


@pytest.mark.parametrize("typed, said", CONFIGURED)
def test_a_mistake_in_the_configuration_is_told(typed, said):
    with pytest.raises(ConfigError) as error:
        validate(make_config(*split(typed)))
    assert said in str(error.value)


@pytest.mark.parametrize("typed, said", [
    ("model=demo_i2v resolution=auto", ["image: missing"]),
    ("model=demo_i2v resolution=auto image=/no/such.png steps=0", ["steps=0: ", "image=/no/such.png: no such file"]),
    ("model=wan22_animate_14b", ["image: missing", "pose: missing", "face: missing"]),
    ("resolution=auto steps=0", ["steps=0: ", "resolution: there is no picture to derive height and width from"]),
])
def test_a_size_that_follows_a_missing_file_is_no_second_problem(typed, said):
    with pytest.raises(ConfigError) as error:
        validate(make_config(*split(typed)))
    count, *problems = str(error.value).splitlines()
    assert count.startswith(f"{len(said)} problem") and len(problems) == len(said), error.value
    assert all(problem.startswith(f"  - {start}") for problem, start in zip(problems, said)), error.value


@pytest.mark.system
@pytest.mark.parametrize("typed, said", RUN)
def test_a_mistake_is_told_before_torch_loads(runs, typed, said):
    answer, output = runs(typed)
    assert said in output, output
    assert answer.returncode == 1 and "Traceback" not in output and "RAW" not in output
    assert not answer.torch


@pytest.mark.system
@pytest.mark.parametrize("typed, said", rows(LATER_TABLE))
def test_what_only_a_device_or_the_model_knows_is_told_before_any_stage(runs, typed, said):
    answer, output = runs(typed, warm())
    assert said in output and answer.returncode == 1, output
    assert "compiled" not in output and "Traceback" not in output


def test_home_may_be_unset(tmp_path):
    """As in containers and under cron."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    command = [sys.executable, "run.py", "--cfg", "job", "--resolve"]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "/wan-torchax/jax" in answer.stdout
