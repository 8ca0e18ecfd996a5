"""Tests how a process finds its rank from the environment of each launcher, and refusals.

A row is the environment of one process of a real start, reduced to variables of launchers, and the
result: (rank, ranks, rank on the host, ranks of the host, address, port); or ALONE; or a part of
the sentence. "?" as ranks of the host: the ranks count them. None as port: we choose one.
"""

from __future__ import annotations

import itertools

import pytest

from parallel3d.errors import UserError
from parallel3d.run.launcher_environment import (
    FIRST_PORT,
    PORTS,
    RankAssignment,
    alone_in_a_job,
    detect,
    prints_for_all,
    refuse_lost_variables,
)

ALONE = None
COUNTED = 0
Taken = tuple[int, int, int, int, str, int | None]


def env(text: str, *more: dict[str, str]) -> dict[str, str]:
    """Returns the variables of a text NAME=value NAME=value, added to others."""
    found: dict[str, str] = {}
    for each in more:
        found |= each
    return found | dict(word.split("=", 1) for word in text.split())


TORCHRUN = env(
    "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 ROLE_RANK=5 "
    "ROLE_WORLD_SIZE=8 MASTER_ADDR=host0 MASTER_PORT=29500 TORCHELASTIC_RESTART_COUNT=0 "
    "TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True"
)
HAND = env("RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_ADDR=host0 MASTER_PORT=29500")
SRUN = env(  # srun -n6 over two of three nodes of a job
    "SLURM_JOB_ID=123456 SLURM_JOBID=123456 SLURM_JOB_NODELIST=node[07-09] SLURM_NNODES=2 "
    "SLURM_JOB_NUM_NODES=3 SLURM_NTASKS=6 SLURM_NPROCS=6 SLURM_TASKS_PER_NODE=4,2 SLURM_STEP_ID=0 "
    "SLURM_STEPID=0 SLURM_STEP_NODELIST=node[08-09] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=6 "
    "SLURM_STEP_TASKS_PER_NODE=4,2 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 "
    "SLURMD_NODENAME=node09 SLURM_STEP_LAUNCHER_PORT=45059 SLURM_CPUS_ON_NODE=2"
)
TWO_BY_8 = env(  # srun -N2 --ntasks-per-node=8
    "SLURM_JOB_ID=77 SLURM_JOB_NODELIST=gpu[01-02] SLURM_NNODES=2 SLURM_NTASKS=16 "
    "SLURM_TASKS_PER_NODE=8(x2) SLURM_STEP_ID=3 SLURM_STEP_NODELIST=gpu[01-02] "
    "SLURM_STEP_NUM_TASKS=16 SLURM_STEP_TASKS_PER_NODE=8(x2) SLURM_PROCID=8 SLURM_LOCALID=0 "
    "SLURM_NODEID=1 SLURMD_NODENAME=gpu02"
)
ENROOT = env("RANK=8 WORLD_SIZE=16 LOCAL_RANK=0 MASTER_ADDR=gpu01 MASTER_PORT=49229")
ONE_TASK = env(
    "SLURM_JOB_ID=9 SLURM_JOB_NODELIST=node3 SLURM_NNODES=1 SLURM_NTASKS=1 SLURM_STEP_ID=0 "
    "SLURM_STEP_NODELIST=node3 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_PROCID=0 "
    "SLURM_LOCALID=0 SLURM_NODEID=0 SLURMD_NODENAME=node3"
)
ARBITRARY = env(  # SLURM_HOSTFILE=hosts srun -n2 -m arbitrary: node3, node1
    "SLURM_DISTRIBUTION=arbitrary SLURM_HOSTFILE=/home/u/hosts SLURM_JOB_ID=2 SLURM_STEP_ID=0 "
    "SLURM_JOB_NODELIST=node[1,3] SLURM_STEP_NODELIST=node[1,3] SLURM_NTASKS=2 "
    "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1 SLURM_LOCALID=0 "
    "SLURM_NODEID=0 SLURMD_NODENAME=node1"
)
HET = env(  # -N1 -n1 -w node3 : -N1 -n2 -w node1, srun --het-group=0,1
    "SLURM_HET_SIZE=2 SLURM_JOB_ID=13 SLURM_JOB_ID_HET_GROUP_0=13 SLURM_JOB_ID_HET_GROUP_1=14 "
    "SLURM_JOB_NODELIST=node[1,3] SLURM_JOB_NODELIST_HET_GROUP_0=node3 "
    "SLURM_JOB_NODELIST_HET_GROUP_1=node1 SLURM_NNODES=2 SLURM_NTASKS=3 SLURM_NTASKS_HET_GROUP_0=1 "
    "SLURM_NTASKS_HET_GROUP_1=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[1,3] "
    "SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_PROCID=2 SLURM_LOCALID=1 "
    "SLURM_NODEID=1 SLURMD_NODENAME=node1"
)
BATCH = env(
    "SLURM_JOB_ID=10 SLURM_JOB_NODELIST=node[1-2] SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 "
    "SLURM_NTASKS=16 SLURM_NPROCS=16 SLURM_NTASKS_PER_NODE=8 SLURM_TASKS_PER_NODE=8(x2) "
    "SLURM_JOB_CPUS_PER_NODE=8(x2) SLURM_CPUS_ON_NODE=8 SLURM_PROCID=0 SLURM_LOCALID=0 "
    "SLURM_NODEID=0 SLURMD_NODENAME=node1"
)
BATCH_OF_ONE = env(
    "SLURM_JOB_ID=6 SLURM_JOB_NODELIST=node3 SLURM_NNODES=1 SLURM_JOB_NUM_NODES=1 SLURM_GPUS=4 "
    "SLURM_GPUS_ON_NODE=4 SLURM_TASKS_PER_NODE=1 SLURM_JOB_CPUS_PER_NODE=1 SLURM_PROCID=0 "
    "SLURM_LOCALID=0 SLURM_NODEID=0 SLURMD_NODENAME=node3"
)
OMPI = env(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=3 OMPI_UNIVERSE_SIZE=4 PMIX_RANK=3 "
    "PMIX_NAMESPACE=prterun-vm-4711@1 PMIX_SERVER_URI41=prterun-vm-4711@0.0;tcp4://127.0.0.1:1"
)
OMPI_2 = OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = env("PMI_RANK=1 PMI_SIZE=2 PMI_FD=9 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1")
PALS = env(
    "PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4 PALS_APID=ab12-cd PALS_RANKID=5 "
    "PALS_NODEID=1 PALS_LOCAL_RANKID=1"
)
JSRUN = env(
    "JSM_NAMESPACE_RANK=6 JSM_NAMESPACE_SIZE=12 JSM_NAMESPACE_LOCAL_RANK=0 "
    "JSM_NAMESPACE_LOCAL_SIZE=6 OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=12 "
    "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=6 PMIX_RANK=6 PMIX_NAMESPACE=1 "
    "LSB_JOBID=42"
)
FLUX = env(
    "FLUX_TASK_RANK=1 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_SIZE=4 FLUX_JOB_NNODES=1 FLUX_JOB_ID=f23x"
)
AZURE = env(
    "RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 NODE_RANK=1 MASTER_ADDR=10.0.0.4 MASTER_PORT=6105 "
    "AZUREML_RUN_ID=quiet_1 AZ_BATCHAI_JOB_MASTER_NODE_IP=10.0.0.4"
)
DEEPSPEED = env(
    "RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_SIZE=8 CROSS_RANK=1 CROSS_SIZE=2 "
    "MASTER_ADDR=worker-0 MASTER_PORT=29500"
)
KUBEFLOW = env(
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PYTHONUNBUFFERED=1 "
    "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8"
)
DLC = env("RANK=1 WORLD_SIZE=2 NPROC_PER_NODE=8 MASTER_ADDR=dlc-master-0 MASTER_PORT=23456")


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


ROWS: dict[str, tuple[dict[str, str], Taken | str | None]] = {
    "nothing": ({}, ALONE),
    "a platform's": (env("MASTER_ADDR=host0 MASTER_PORT=1234 LOCAL_RANK=0"), ALONE),
    "settings of MPI in an image": (
        env("OMPI_MCA_btl=tcp PMIX_MCA_gds=hash PMI_NO_FORK=1 OMPI_MCA_coll_hcoll_enable=0"),
        ALONE,
    ),
    # torch's variables
    "torchrun": (TORCHRUN, (5, 8, 1, 4, "host0", 29500)),
    "torchrun, one rank": (
        TORCHRUN | env("RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1"),
        (0, 1, 0, 1, "host0", 29500),
    ),
    "torchrun inside srun, one task a node": (
        TWO_BY_8 | env("SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)") | TORCHRUN,
        (5, 8, 1, 4, "host0", 29500),
    ),
    "torchrun inside a step of many": (SRUN | TORCHRUN, (5, 8, 1, 4, "host0", 29500)),
    "torchrun in a batch script": (BATCH | TORCHRUN, (5, 8, 1, 4, "host0", 29500)),
    "torchrun in a pod": (DLC | TORCHRUN, (5, 8, 1, 4, "host0", 29500)),
    "by hand": (HAND | env("LOCAL_WORLD_SIZE=4"), (5, 8, 1, 4, "host0", 29500)),
    "an operator": (HAND, (5, 8, 1, COUNTED, "host0", 29500)),
    "an operator on one host": (
        HAND | env("MASTER_ADDR=127.0.0.1"),
        (5, 8, 1, 8, "127.0.0.1", 29500),
    ),
    "AzureML": (AZURE, (9, 16, 1, COUNTED, "10.0.0.4", 6105)),
    "deepspeed": (DEEPSPEED, (9, 16, 1, 8, "worker-0", 29500)),
    "Kubeflow": (KUBEFLOW, "count hosts (Kubeflow, DLC): start with torchrun --nnodes=$WORLD_SIZE"),
    "Kubeflow, LOCAL_RANK added": (KUBEFLOW | env("LOCAL_RANK=0"), "PET_NPROC_PER_NODE=8 contra"),
    "Kubeflow, one host": (
        KUBEFLOW | env("RANK=0 WORLD_SIZE=1 PET_NNODES=1 PET_NODE_RANK=0"),
        ALONE,
    ),
    "Kubeflow's trainer": (
        env("PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=a"),
        "PET_NNODES means 2 hosts",
    ),
    "DLC": (DLC, "count hosts (Kubeflow, DLC)"),
    "DLC, LOCAL_RANK added": (DLC | env("LOCAL_RANK=0"), "NPROC_PER_NODE=8 contradicts"),
    "SageMaker": (
        env('SM_HOSTS=["algo-1","algo-2"] SM_CURRENT_HOST=algo-1'),
        "SM_HOSTS means 2 hosts",
    ),
    "SageMaker, one host": (env('SM_HOSTS=["algo-1"] SM_CURRENT_HOST=algo-1'), ALONE),
    "SkyPilot": (env("SKYPILOT_NUM_NODES=4 SKYPILOT_NODE_RANK=0"), "SKYPILOT_NUM_NODES means 4"),
    "RANK is missing": (without(HAND, "RANK"), "WORLD_SIZE=8 is set but RANK is not"),
    "WORLD_SIZE is missing": (without(TORCHRUN, "WORLD_SIZE"), "RANK=5 is set but WORLD_SIZE is"),
    "LOCAL_RANK is missing": (without(TORCHRUN, "LOCAL_RANK"), "but LOCAL_RANK is not"),
    "LOCAL_RANK above RANK": (HAND | env("RANK=0"), "LOCAL_RANK=1 contradicts RANK=0"),
    "an address with a port": (HAND | env("MASTER_ADDR=host0:29500"), "is not the name or address"),
    "an address of IPv6": (
        TORCHRUN | env("MASTER_ADDR=fd00::1"),
        (5, 8, 1, 4, "fd00::1", 29500),
    ),
    "neither is there": (
        without(TORCHRUN, "RANK", "WORLD_SIZE"),
        "is set but RANK and WORLD_SIZE are not",
    ),
    "a rank on its host alone": (env("LOCAL_RANK=3"), "LOCAL_RANK=3 is set but RANK and"),
    "MASTER_ADDR is missing": (without(HAND, "MASTER_ADDR"), "RANK=5 is set but MASTER_ADDR is"),
    "MASTER_PORT is empty": (HAND | {"MASTER_PORT": ""}, "but MASTER_PORT is not"),
    "RANK too large": (TORCHRUN | env("RANK=8"), "RANK=8 contradicts WORLD_SIZE=8"),
    "RANK below zero": (HAND | env("RANK=-1"), "RANK=-1 is too small"),
    "more ranks here than in all": (
        TORCHRUN | env("LOCAL_WORLD_SIZE=9"),
        "LOCAL_WORLD_SIZE=9 contradicts WORLD_SIZE=8",
    ),
    "LOCAL_RANK too large": (TORCHRUN | env("LOCAL_RANK=4"), "contradicts LOCAL_WORLD_SIZE=4"),
    "no number": (TORCHRUN | env("MASTER_PORT=http"), "MASTER_PORT='http' is not a whole number"),
    "a number of another script": (HAND | {"RANK": "\u0663"}, "is not a whole number"),
    # Slurm
    "srun": (SRUN, (5, 6, 1, 2, "node08", None)),
    "srun of an older Slurm": (
        without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEPID", "SLURM_JOBID", "SLURMD_NODENAME"),
        (5, 6, 1, 2, "node08", None),
    ),
    "a step of another node than the job's first": (
        SRUN
        | env("SLURM_STEP_NODELIST=node09 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2")
        | env("SLURM_PROCID=1 SLURM_NODEID=0"),
        (1, 2, 1, 2, "node09", None),
    ),
    "srun with PMI": (
        TWO_BY_8 | env("PMI_RANK=8 PMI_SIZE=16 PMI_JOBID=77.3 PMI_FD=11"),
        (8, 16, 0, 8, "gpu01", None),
    ),
    "srun with PMIx": (
        TWO_BY_8 | env("PMIX_RANK=8 PMIX_NAMESPACE=slurm.pmix.77.3"),
        (8, 16, 0, 8, "gpu01", None),
    ),
    "Enroot's hook": (TWO_BY_8 | ENROOT, (8, 16, 0, 8, "gpu01", 49229)),
    "a hook without an address": (
        TWO_BY_8 | without(ENROOT, "MASTER_ADDR", "MASTER_PORT"),
        (8, 16, 0, 8, "gpu01", None),
    ),
    "WORLD_SIZE exported by the script": (
        TWO_BY_8 | env("WORLD_SIZE=16 MASTER_ADDR=gpu01 MASTER_PORT=29500"),
        (8, 16, 0, 8, "gpu01", None),
    ),
    "a hook of one rank in each task": (
        TWO_BY_8 | ENROOT | env("RANK=0 WORLD_SIZE=1"),
        "SLURM_PROCID=8 SLURM_STEP_NUM_TASKS=16 and RANK=0 WORLD_SIZE=1 contradict",
    ),
    "WORLD_SIZE of nodes": (TWO_BY_8 | env("WORLD_SIZE=2"), "16 and 2 ranks"),
    "a hook's wrong number on the host": (
        TWO_BY_8 | ENROOT | env("LOCAL_WORLD_SIZE=16"),
        "8 and 16 ranks on this host",
    ),
    "a hook's address of another node": (
        TWO_BY_8 | ENROOT | env("MASTER_ADDR=gpu02"),
        "MASTER_ADDR=gpu02 is a node of this job, but rank 0 is on gpu01",
    ),
    "a hook's address by number": (
        TWO_BY_8 | ENROOT | env("MASTER_ADDR=10.1.0.1"),
        (8, 16, 0, 8, "10.1.0.1", 49229),
    ),
    "one task": (ONE_TASK, ALONE),
    "one task with a hook": (ONE_TASK | env("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0"), ALONE),
    "one task with PMIx": (ONE_TASK | env("PMIX_RANK=0 PMIX_NAMESPACE=slurm.pmix.9.0"), ALONE),
    "one task with PMI": (ONE_TASK | env("PMI_RANK=0 PMI_SIZE=1"), ALONE),
    "one task in an allocation of many": (BATCH | ONE_TASK, ALONE),
    "a batch script of one task": (BATCH_OF_ONE, ALONE),
    "a batch script, --exclusive": (
        BATCH_OF_ONE | env("SLURM_TASKS_PER_NODE=64 SLURM_JOB_CPUS_PER_NODE=64"),
        ALONE,
    ),
    "a batch script without srun": (BATCH, "this Slurm job has 16 tasks, but only this process"),
    "a batch script, no SLURM_NTASKS": (
        without(BATCH, "SLURM_NTASKS", "SLURM_NPROCS"),
        "put srun before",
    ),
    "a batch script, tasks by node alone": (
        BATCH_OF_ONE | env("SLURM_TASKS_PER_NODE=8 SLURM_JOB_CPUS_PER_NODE=64"),
        "this Slurm job has 8 tasks",
    ),
    "a batch script of two nodes": (
        BATCH_OF_ONE | env("SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 SLURM_TASKS_PER_NODE=1(x2)"),
        "put srun before",
    ),
    "a job's names alone": (env("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2]"), "2 nodes"),
    "the image's WORLD_SIZE=1 in it": (BATCH | env("RANK=0 WORLD_SIZE=1"), "put srun before"),
    "the batch script's own step": (
        BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        "put srun before",
    ),
    "a shell of salloc": (
        env("SLURM_JOB_ID=15 SLURM_JOB_NODELIST=node3 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=4"),
        "put srun before",
    ),
    "a shell of salloc of one task": (
        env("SLURM_JOB_ID=15 SLURM_JOB_NODELIST=node3 SLURM_NTASKS=1 SLURM_TASKS_PER_NODE=1"),
        ALONE,
    ),
    "a batch script of components": (
        BATCH_OF_ONE | env("SLURM_HET_SIZE=2 SLURM_NTASKS=1"),
        "2 components",
    ),
    "arbitrary": (ARBITRARY, (1, 2, 0, 1, "node3", None)),
    "arbitrary without its file": (
        ARBITRARY | env("SLURM_HOSTFILE=/tmp/gone"),
        "cannot be read here",
    ),
    "arbitrary without a name of it": (
        without(ARBITRARY, "SLURM_HOSTFILE"),
        "give launch.master_addr",
    ),
    "components": (HET, (2, 3, 1, 2, "node3", None)),
    "components without their nodes": (
        without(HET, "SLURM_JOB_NODELIST_HET_GROUP_0"),
        "SLURM_HET_SIZE=2 means a job of several components",
    ),
    "components, rank 0": (
        HET | env("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURMD_NODENAME=node3"),
        (0, 3, 0, 1, "node3", None),
    ),
    "the second component alone": (
        HET
        | env("SLURM_STEP_NODELIST=node1 SLURM_JOB_NODELIST=node1 SLURM_STEP_NUM_TASKS=2")
        | env("SLURM_STEP_TASKS_PER_NODE=2 SLURM_PROCID=1 SLURM_NODEID=0 SLURM_STEP_ID=1"),
        (1, 2, 1, 2, "node1", None),
    ),
    "rank 0 elsewhere": (
        TWO_BY_8 | env("SLURM_PROCID=0 SLURM_NODEID=1"),
        "rank 0 runs on gpu02, but Slurm's variables make the other ranks look for it on gpu01",
    ),
    "no SLURM_PROCID": (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID is not set, but SLURM_STEP"),
    "no SLURM_STEP_ID": (without(SRUN, "SLURM_STEP_ID", "SLURM_STEPID"), "SLURM_STEP_ID is not"),
    "no SLURM_LOCALID": (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
    "nothing but SLURM_PROCID": (env("SLURM_PROCID=3"), "SLURM_PROCID=3 is set but SLURM_STEP_ID"),
    "SLURM_PROCID too large": (
        SRUN | env("SLURM_PROCID=6"),
        "SLURM_PROCID=6 contradicts SLURM_STEP_NUM_TASKS=6",
    ),
    "SLURM_NODEID too large": (
        without(SRUN, "SLURMD_NODENAME") | env("SLURM_NODEID=2"),
        "SLURM_NODEID=2 contradicts",
    ),
    "SLURM_JOB_ID no number": (SRUN | env("SLURM_JOB_ID=x"), "SLURM_JOB_ID='x'"),
    "a torn list of nodes": (SRUN | env("SLURM_STEP_NODELIST=node[1-"), "node list 'node[1-'"),
    "tasks that make another sum": (
        SRUN | env("SLURM_STEP_TASKS_PER_NODE=4,4"),
        "means 8 tasks, but this step has",
    ),
    # MPI and its like
    "mpirun": (OMPI, (3, 4, 3, 4, "127.0.0.1", None)),
    "mpirun with an address": (
        OMPI_2 | env("MASTER_ADDR=host0 MASTER_PORT=29500"),
        (3, 4, 1, 2, "host0", 29500),
    ),
    "mpirun with a host": (OMPI_2 | env("MASTER_ADDR=host0"), (3, 4, 1, 2, "host0", None)),
    "mpirun over hosts": (OMPI_2, "does not say where rank 0 is: export MASTER_ADDR"),
    "mpirun in AzureML": (
        OMPI_2 | env("AZ_BATCH_MASTER_NODE=10.0.0.4:6000"),
        (3, 4, 1, 2, "10.0.0.4", None),
    ),
    "mpirun -n 1": (
        without(OMPI, "PMIX_RANK")
        | env("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0")
        | env("OMPI_COMM_WORLD_LOCAL_SIZE=1"),
        ALONE,
    ),
    "mpirun in a batch script": (
        BATCH | OMPI | env("MASTER_ADDR=node1"),
        (3, 4, 3, 4, "node1", None),
    ),
    "mpirun whose daemons srun started": (
        TWO_BY_8
        | env("SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)")
        | env("SLURM_PROCID=1 SLURM_LOCALID=0 MASTER_ADDR=gpu01")
        | OMPI_2,
        (3, 4, 1, 2, "gpu01", None),
    ),
    "mpirun and RANK alike": (
        OMPI | env("RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 MASTER_ADDR=h MASTER_PORT=29500"),
        (3, 4, 3, 4, "h", 29500),
    ),
    "mpirun and RANK otherwise": (
        OMPI | env("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0"),
        "RANK=0 WORLD_SIZE=1 and OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 contradict",
    ),
    "mpirun without its number": (
        without(OMPI, "OMPI_COMM_WORLD_RANK"),
        "but OMPI_COMM_WORLD_RANK is not",
    ),
    "mpiexec of MPICH": (
        MPICH,
        "does not identify its starts, so no port can be derived: export MASTER_PORT",
    ),
    "mpiexec with an address": (
        MPICH | env("MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"),
        (1, 2, 1, 2, "127.0.0.1", 29500),
    ),
    "PALS": (PALS | env("MASTER_ADDR=x1000"), (5, 8, 1, 4, "x1000", None)),
    "PALS without an address": (PALS, "export MASTER_ADDR"),
    "jsrun, by Open MPI's variables": (JSRUN | env("MASTER_ADDR=c01"), (6, 12, 0, 6, "c01", None)),
    "flux": (FLUX, (1, 4, 1, 4, "127.0.0.1", None)),
    "horovodrun, without a row": (
        env("HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2"),
        "the launcher that set HOROVOD_RANK=1 has started: start with srun or torchrun",
    ),
    "aprun, without a row": (
        env("ALPS_APP_PE=1 ALPS_APP_DEPTH=1"),
        "the launcher that set ALPS_APP_PE=1 has started: start with srun or torchrun",
    ),
    "PMIx alone": (env("PMIX_RANK=3 PMIX_NAMESPACE=x"), "the launcher that set PMIX_RANK=3 has"),
    "PMI_RANK alone": (env("PMI_RANK=3"), "but PMI_SIZE is not"),
    "PALS without PMI": (
        env("PALS_RANKID=1 PALS_APID=x"),
        "no known variable says how many ranks the launcher that set PALS_RANKID=1 has started",
    ),
    "PALS, the image's WORLD_SIZE=1": (
        env("RANK=0 WORLD_SIZE=1 PALS_RANKID=1 PALS_APID=x"),
        "RANK=0 WORLD_SIZE=1 and PALS_RANKID=1 contradict each other",
    ),
    "PMIx and RANK without LOCAL_RANK": (
        env("RANK=5 WORLD_SIZE=8 PMIX_RANK=5 MASTER_ADDR=h MASTER_PORT=29500"),
        "has not set LOCAL_RANK, ",
    ),
    "mpirun_rsh of MVAPICH": (
        env("MPIRUN_RANK=1 MPIRUN_NPROCS=4"),
        "the launcher that set MPIRUN_RANK=1 has",
    ),
    "MPIJob without mpirun": (env("K_MPI_JOB_ROLE=launcher"), "put mpirun before the command"),
    "Vertex AI": (
        {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a"], "workerpool1": ["b", "c"]}}'},
        "CLUSTER_SPEC means 3 hosts",
    ),
    "Vertex AI, one host": ({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a"]}}'}, ALONE),
    "elastic Kubeflow": (env("PET_NNODES=1:4"), "PET_NNODES means 4 hosts"),
    "LSF without jsrun": (env("LSB_JOBID=1 LSB_MCPU_HOSTS=c1 LSB_HOSTS=x"), ALONE),
    "LSF over hosts": ({"LSB_MCPU_HOSTS": "c1 8 c2 8"}, "LSB_MCPU_HOSTS means 2 hosts"),
    "Azure Batch": (env("AZ_BATCH_HOST_LIST=10.0.0.4,10.0.0.5"), "AZ_BATCH_HOST_LIST means 2"),
    "PBS over hosts": (env("PBS_JOBID=1.pbs PBS_NUM_NODES=2"), "PBS_NUM_NODES means 2 hosts"),
    "PBS Professional": (env("PBS_JOBID=1 PBS_NODEFILE=/pbs/two"), "PBS_NODEFILE means 2 hosts"),
    "PBS Professional, one host": (env("PBS_JOBID=1 PBS_NODEFILE=/pbs/one NCPUS=64"), ALONE),
    "PBS in a container": (env("PBS_NODEFILE=/pbs/gone"), "PBS_NODEFILE=/pbs/gone cannot be read"),
    "mpiexec in PBS": (
        PALS | env("PBS_NODEFILE=/pbs/two MASTER_ADDR=x1000"),
        (5, 8, 1, 4, "x1000", None),
    ),
    "OAR": (env("OAR_JOB_ID=7 OAR_NODEFILE=/pbs/two"), "OAR_NODEFILE means 2 hosts"),
    "Volcano": (
        env(
            "VC_TASK_INDEX=1 VC_WORKER_NUM=2 VC_WORKER_HOSTS=a,b VC_MASTER_NUM=1 VC_MASTER_HOSTS=m"
        ),
        "VC_*_NUM means 3 hosts",
    ),
    "Volcano, one pod": (env("VC_TASK_INDEX=0 VC_WORKER_NUM=1 VC_WORKER_HOSTS=a"), ALONE),
    "Volcano's plugin for torch": (
        env("VC_TASK_INDEX=0 VC_WORKER_NUM=2 RANK=1 WORLD_SIZE=3 MASTER_ADDR=m MASTER_PORT=23456"),
        "count hosts (Kubeflow, DLC)",
    ),
    "a LeaderWorkerSet": (env("LWS_GROUP_SIZE=4 LWS_WORKER_INDEX=0"), "LWS_GROUP_SIZE means 4"),
    "AWS Batch": (
        env("AWS_BATCH_JOB_NUM_NODES=4 AWS_BATCH_JOB_NODE_INDEX=0"),
        "AWS_BATCH_JOB_NUM_NODES means 4 hosts",
    ),
    "dstack": (env("DSTACK_NODES_NUM=2 DSTACK_NODE_RANK=1"), "DSTACK_NODES_NUM means 2 hosts"),
    "dstack, one host": (env("DSTACK_NODES_NUM=1 DSTACK_NODE_RANK=0"), ALONE),
    "Beaker": (env("BEAKER_REPLICA_COUNT=2 BEAKER_REPLICA_RANK=0"), "means 2 hosts"),
    "Lepton": (env("LEPTON_JOB_TOTAL_WORKERS=2 LEPTON_JOB_WORKER_INDEX=0"), "means 2 hosts"),
    "Volcengine": (env("MLP_WORKER_NUM=2 MLP_ROLE_INDEX=0"), "MLP_WORKER_NUM means 2 hosts"),
    "a script's range of hosts": (env("NNODES=1:4 NODE_RANK=0"), "NNODES means 4 hosts"),
    "a script's number that is none": (
        env("NNODES=two NODE_RANK=0"),
        "NNODES='two' is not a number of hosts",
    ),
    "a host's number alone": (env("NODE_RANK=1"), "NODE_RANK=1 means that there are other hosts"),
    "the first host's number alone": (env("NODE_RANK=0"), ALONE),
    "a torn list of hosts": (env("SM_HOSTS=[algo-1"), "SM_HOSTS='[algo-1' is not JSON"),
    "a pod of an indexed Job": (env("JOB_COMPLETION_INDEX=3"), ALONE),
}


def read(path: str) -> str:
    if path == "/home/u/hosts":
        return "# rank 0\nnode3*1\nnode1\n"
    if path in ("/pbs/one", "/pbs/two"):
        return "x1000\nx1000\n" + "x1001\n" * (path == "/pbs/two")
    raise FileNotFoundError(2, "No such file or directory")


def taken(environ: dict[str, str]) -> RankAssignment | None:
    return detect(environ, read=read)


@pytest.mark.parametrize("row", ROWS)
def test_an_environment_is_known_or_refused(row: str) -> None:
    environ, right = ROWS[row]
    if isinstance(right, str):
        with pytest.raises(UserError) as refused:
            taken(environ)
        assert right in str(refused.value)
        return
    place = taken(environ)
    if place is None or right is None:
        assert place is right
        return
    numbers = (place.rank, place.world_size, place.local_rank, place.local_world_size)
    assert (*numbers, place.master_addr) == right[:5]
    assert place.master_port == right[5] or right[5] is None
    assert right[5] is not None or place.master_port in range(FIRST_PORT, FIRST_PORT + PORTS)


def steps(job: int, *more: dict[str, str]) -> list[RankAssignment | None]:
    """Returns the ranks' places in three steps of a job."""
    many = [env(f"SLURM_JOB_ID={job} SLURM_STEP_ID={step}", TWO_BY_8, *more) for step in range(3)]
    return [taken(environ) for environ in many]


def test_no_two_starts_meet() -> None:
    """Compares steps of a job, jobs 20,000 apart, elements of an array, and a job that was queued
    again."""
    jobs = [7, 20007, 40007, 7 + PORTS, *range(100, 110)]
    places = [*itertools.chain(*map(steps, jobs)), *steps(7, env("SLURM_RESTART_COUNT=1"))]
    places += [taken(OMPI), taken(OMPI | env("PMIX_NAMESPACE=prterun-vm-4712@1")), taken(FLUX)]
    assert None not in places
    assert len({(place.master_port, place.prefix) for place in places if place}) == len(places)
    assert len({place.prefix for place in places if place}) == len(places)
    for job in jobs:
        assert len({place.master_port for place in steps(job) if place}) == 3


def test_keys_replace_the_launchers_address() -> None:
    place = detect(ARBITRARY, "10.0.0.3")  # without reading the file
    assert place is not None and place.master_addr == "10.0.0.3"
    place = detect(OMPI_2, "host0", 29600)
    assert place is not None and (place.master_addr, place.launcher) == ("host0", "mpi")
    place = detect(MPICH, None, 29600)
    assert place is not None and place.master_port == 29600
    hook = detect(TWO_BY_8 | ENROOT | env("MASTER_ADDR=gpu02"), "gpu01")
    assert hook is not None and hook.master_addr == "gpu01"
    assert hook.with_port(29600).master_port == 29600


def test_the_key_for_the_address_is_refused_under_torchrun() -> None:
    place = detect(TORCHRUN)
    assert place is not None and place.with_port(29600).master_port == 29500
    with pytest.raises(UserError, match="start torchrun with --master-addr=host1"):
        detect(TORCHRUN, "host1")


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({}, None),
        (
            env("JOB_COMPLETION_INDEX=3"),
            "JOB_COMPLETION_INDEX=3: this pod of a Kubernetes Job trains",
        ),
        (env("JOB_COMPLETION_INDEX=1", TORCHRUN), None),
        (
            TWO_BY_8 | TORCHRUN | env("RANK=0 LOCAL_RANK=0 GROUP_RANK=0 GROUP_WORLD_SIZE=1"),
            "this step has 16 tasks, and a torchrun in each trains a run of its own",
        ),
        (TWO_BY_8 | TORCHRUN | env("RANK=0 LOCAL_RANK=0 GROUP_WORLD_SIZE=2"), None),
        (ONE_TASK | TORCHRUN | env("RANK=0 LOCAL_RANK=0 GROUP_WORLD_SIZE=1"), None),
    ],
)
def test_a_process_that_may_belong_to_a_larger_job_says_so(
    environ: dict[str, str], line: str | None
) -> None:
    said = alone_in_a_job(environ, taken(environ))
    assert said is None if line is None else (said or "").startswith(line)


def test_only_one_process_of_many_prints() -> None:
    assert [prints_for_all(e) for e in ({}, BATCH, SRUN, OMPI, PALS, HAND)] == [
        *(True, True, False, False, False, False)
    ]


def test_some_commands_may_run_outside_of_the_jobs_tasks() -> None:
    """Tests `parallel3d generate` in a shell of an allocation of many tasks."""
    assert detect(BATCH, starts=None) is None


def test_one_process_may_start_the_tasks_of_one_node() -> None:
    """Tests `sbatch -N1 -n8 --wrap "parallel3d train tp=8"`."""
    node = BATCH_OF_ONE | env("SLURM_NTASKS=8 SLURM_TASKS_PER_NODE=8")
    assert detect(node, starts=8) is None
    with pytest.raises(UserError, match="8 tasks"):
        detect(node, starts=4)
    with pytest.raises(UserError, match="16 tasks"):
        detect(BATCH, starts=16)  # over two nodes


def test_a_task_without_variables_is_found_by_its_cgroup() -> None:
    cgroups = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_{}\n"
    refuse_lost_variables({}, cgroups.format(0))
    refuse_lost_variables({}, "0::/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0\n")
    refuse_lost_variables(SRUN, cgroups.format(3))
    with pytest.raises(UserError, match="task 3 of step 0 of Slurm job 7"):
        refuse_lost_variables({}, cgroups.format(3))
