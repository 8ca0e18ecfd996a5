"""Price of a step's communication on the links that it uses."""
