"""``specmamba bench gpu``. Before anything of it is imported, packages that an image lacks are taken from wheels."""

from specmamba.bench.gpu.carried import use_carried

use_carried()
