"""Values and words that have broken programs before, and that `benchmarks/inputs/fuzz.py` types."""

from __future__ import annotations

from fractions import Fraction
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


HUGE = (10**6, 2**31 - 1, 2**31, 2**61 - 1, 2**63 - 1, 2**64, 10**12, 10**15 + 37, 10**18, 10**400)

NUMBERS = (
    *_words("-1 -0 00 +1 0x10 0b1 1_000 2.5 1e3 1e400 -1e308 1e-400 5e-324 1e ٣ ½"),
    *_words("nan NaN .nan inf -inf -.inf"),
    *("9" * 5000, "0" * 5000),
    *map(str, HUGE),
    *(str(-number) for number in HUGE),
)

TEXTS = (
    *("", " ", "a b", "\x00", "a\x00b", "\n", "a\nb", "\r", "\t", "\x07", "\x1b[31mred\x1b[0m"),
    *("\x7f", "\x85", "\u2028", "\u202eabc", "\ufeff", "e\u0301", "\udc80", "\ud800"),
    *_words("two null Null ~ true off yes ??? . .. ../../etc / * [ é 日本語 🤖 İ ß"),
    *_words("/dev/null/x /proc/self/mem no/such/path ~nobody/x"),
    *_words("' \" \\ \\\\ ` $ $(id) ; | & # %s % { } {} [] ( ) @ ! << &a *a !!python/object:os.x"),
    *_words("a=b a:b a,b {a:1} {a:{b:[1]}} [1] [1,2,3] [1,a] [null] [[1]] [a,b] [1.5] [-1] [true]"),
    *_words("[NCCL_X:1] [x.y:1] sweep(1,2) choice(1,2) range(0,1000000000) interval(0,1) glob(*)"),
    *_words("int(3) str([1]) float(x) json_str(1) extend_list(1) shuffle(1,2) sort(3,1)"),
    *("x" * 10_000, "[" * 60 + "]" * 60, "[" * 2000, f"[{','.join('1' * 5000)}]"),
)

REFERENCES = (
    *_words("${tp} ${nope} ${.} ${..tp} ${model} ${model.num_layers} ${optim.lr} ${run} ${prompt}"),
    *_words("${logger.tags} ${logger.tags[0]} ${logger.tags.0} ${a $a} ${${tp}} ${tp}${pp}"),
    *_words("${oc.env:NO_SUCH} ${oc.env:HOME} ${oc.env:NO_SUCH,null} ${oc.create:[1]}"),
    *_words("${oc.decode:'['} ${oc.decode:${prompt}} ${oc.dict.keys:model} ${oc.select:nope,7}"),
    *_words("${oc.deprecated:tp} ${hydra:job.name} ${hydra.job.num} ${nope:1} ${now:%Y}"),
    *_words("${python_version:major} \\${tp} ${tp:} ${} a${tp}b"),
    "${" * 300 + "tp" + "}" * 300,
)

# Words that are not KEY=VALUE, or whose key does not exist.
ODD = (
    *("", " ", "tp=2 pp=2", "tp: 2", "tp =2", "tp= 2", "t\x00p=2", "tp\n=2", "tp=2\n", "\udc80=1"),
    *("\x1b[31m=1", "x" * 5000 + "=1", "a." * 3000 + "b=1"),
    *_words("= == =3 tp tp= tp==2 - -- --- -x --tp=2 --fp16 + ~ ++ ~tp ~tp=1 ~model ~nope"),
    *_words("+tp=2 ++tp=2 +nope=1 ++nope=1 ~model.name 'tp=2 tp='2 tp=\"2 tp=2' TP=2 日本語=1"),
    *_words("+model=gpt_tiny model@x=gpt_tiny +model@x=gpt_tiny model=[gpt_tiny] model=3"),
    *_words("model=null model=nope model= model=. model=../config /model=x model={hidden_size:3}"),
    *_words("experiment=nope experiment=[a,b] experiment={} ddp=3 ddp={} ddp=null ddp=[]"),
    *_words("model.hidden_size.x=3 model..x=1 .tp=1 tp.=1 a.b.c=1 schedule.layers_per_stage[0]=3"),
    *_words("logger.tags.0=a +logger.tags.0=a logger.tags[9]=a checkpoint.async=maybe"),
    *_words("hydra=1 hydra.nope=1 hydra/launcher=nope hydra.job.num=x hydra.run.dir=${nope}"),
    *_words("_target_=os.system +_target_=os.system +model._target_=x defaults=[] +defaults=[]"),
    *_words("schema=x +schema=x _self_=1 config=3 ~checkpoint.async"),
)

# Values that a Config may get in Python.
OBJECTS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 2.5, -0.0, 10**5000, float("nan"), float("inf"), 5e-324),
    *("", "2", b"2", 2j, (), [], {}, [None], [[1]], ["a"], [1, "a"], [10**400], {1: 2}, {"a"}),
    *([float("nan")], [1] * 100_000, "x" * 100_000, range(3), object, NotImplemented, ...),
    Fraction(1, 3),
)
