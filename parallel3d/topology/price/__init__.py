"""What the communication of a step costs on the wires that it takes."""
