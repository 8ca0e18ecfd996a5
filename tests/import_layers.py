"""A contract for import-linter: layers of packages, and layers of one file of every package."""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import ContractCheck
from importlinter.contracts.layers import Layer, LayersContract, ModuleTail


class FileLayers(LayersContract):
    """Layers of packages, of which some files are in layers of their own.

    A layer may be named `*.keys`: the file `keys.py` of each package is then in this layer, and not
    in that of its package. There is one container, which is the package as a whole.
    """

    type_name = "file_layers"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        # import-linter replaces the fields of a class by their values in its instances.
        containers: Any = self.containers
        layers: Any = self.layers
        (container,) = (each.expression for each in containers)
        self.layers: Any = [self._with_files(layer, container, graph) for layer in layers]
        return super().check(graph, verbose)

    def _with_files(self, layer: Layer, container: str, graph: ImportGraph) -> Layer:
        """Moves the files of a layer out of their packages, and returns the layer with them."""
        tails = set()
        for tail in layer.module_tails:
            if "." not in tail.name:
                tails.add(tail)
                continue
            for module in graph.find_matching_modules(f"{container}.{tail.name}"):
                name = module.removeprefix(f"{container}.").replace(".", "/")
                _rename(graph, module, f"{container}.{name}")
                tails.add(ModuleTail(name))
        return Layer(tails, layer.is_independent)


def _rename(graph: ImportGraph, old: str, new: str) -> None:
    graph.add_module(new)
    edges = [(old, imported) for imported in graph.find_modules_directly_imported_by(old)]
    edges += [(importer, old) for importer in graph.find_modules_that_directly_import(old)]
    for importer, imported in edges:
        for place in graph.get_import_details(importer=importer, imported=imported):
            graph.add_import(
                importer=new if importer == old else importer,
                imported=new if imported == old else imported,
                line_number=place["line_number"],
                line_contents=place["line_contents"],
            )
    graph.remove_module(old)
