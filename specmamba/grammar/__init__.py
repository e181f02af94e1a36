"""Structured output: compiled grammars, and the masks that keep every node of a draft tree within one."""

from specmamba.grammar.compilations import CompiledGrammar
from specmamba.grammar.compiler import GrammarCompiler
from specmamba.grammar.matcher import GrammarMatcher, TreeMask

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarMatcher", "TreeMask"]
