"""Variables as the launchers set them, cut down to what bears on identity."""

from types import MappingProxyType

__all__ = ["MASTER", "SBATCH", "SRUN_PMI2", "hydra", "openmpi", "slurm_step", "torchrun"]

MASTER = MappingProxyType({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})

SRUN_PMI2 = MappingProxyType(
    {
        "PMI_FD": "11",
        "PMI_JOBID": "14.0",
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        "SLURMD_NODENAME": "n2",
        "SLURM_CLUSTER_NAME": "here",
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_GTIDS": "3",
        "SLURM_JOBID": "14",
        "SLURM_JOB_CPUS_PER_NODE": "3,1",
        "SLURM_JOB_ID": "14",
        "SLURM_JOB_NAME": "sh",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_LOCALID": "0",
        "SLURM_MPI_TYPE": "pmi2",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_NODELIST": "n[1-2]",
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS": "4",
        "SLURM_PRIO_PROCESS": "0",
        "SLURM_PROCID": "3",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURM_SRUN_COMM_PORT": "32903",
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_LAUNCHER_PORT": "32903",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
        "SLURM_TASKS_PER_NODE": "3,1",
        "SLURM_TASK_PID": "5388",
        "SLURM_TOPOLOGY_ADDR": "n2",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        "SLURM_UMASK": "0022",
    }
)
"""The last task of ``srun --mpi=pmi2 -n 4 -N 2``, Slurm 22.05.8."""

SBATCH = MappingProxyType(
    {
        "SLURMD_NODENAME": "n1",
        "SLURM_CLUSTER_NAME": "here",
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_GTIDS": "0",
        "SLURM_JOBID": "7",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "job.sh",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "n1",
        "SLURM_NODE_ALIASES": "(null)",
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_TASKS_PER_NODE": "4",
        "SLURM_TASK_PID": "1550",
    }
)
"""The script of ``sbatch -n 4 -N 1``, Slurm 22.05.8."""


def torchrun(*, rank: int, world_size: int, local_rank: int, local_world_size: int) -> dict[str, str]:
    """One worker of torchrun, hosts of equal size."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "GROUP_WORLD_SIZE": str(world_size // local_world_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **MASTER,
    }


def slurm_step(*, rank: int, tasks: int, local_rank: int, node: int, nodes: int, per_node: str) -> dict[str, str]:
    """One task of an srun step."""
    return {
        "SLURM_JOB_ID": "815",
        "SLURM_JOBID": "815",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_NNODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": "gpu[03-04]" if nodes > 1 else "gpu03",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
        "SLURM_SRUN_COMM_HOST": "10.0.0.9",
    }


def openmpi(*, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """One process of Open MPI's mpirun."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "OMPI_UNIVERSE_SIZE": str(size),
        "PMIX_RANK": str(rank),
    }


def hydra(*, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """One process of MPICH's or Intel MPI's mpiexec."""
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "PMI_FD": "7",
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_size),
    }
