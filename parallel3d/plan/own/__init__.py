"""What a rank of parallel3d's own code holds and launches, from shapes: `dryrun`, in closed form."""
