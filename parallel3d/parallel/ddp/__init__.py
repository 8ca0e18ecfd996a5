"""Implements DistributedDataParallel over NCCL, gloo or shared memory."""
