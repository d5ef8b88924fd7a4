// Command runsc is gVisor's, with six things of our own:
//
//   - The sentry's seccomp filters are compiled ahead, as in gVisor's own releases; `go build` of the module alone would
//     compile them at every start and every restore, which is a quarter of the work of each. The file with them
//     (filters.go) is written by ./filters during the build and never kept: its keys name options and not rules, so one of
//     another version would be taken without a word.
//   - A sentry has a few threads of Go's more than the machine has processors. Goroutines that wait in host system calls
//     hold on to theirs until the runtime notices, which takes up to 10 ms; on a machine with two processors two such
//     waiters are enough to stop the rest, and a restored sandbox begins with just that.
//   - Whether the sentry and its stubs wait for each other by spinning is decided by trying both,
//   - only system calls that are made often are replaced by jumps,
//   - a port that was used before a restore can be used again after it, and
//   - an EROFS image may be of several files, where the first refers to the others (pkg/erofs/layers.go). These four are changes
//     of gVisor's source, made by ./amend during the build.
package main

import (
	"os"
	"slices"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/gomaxprocs"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/version"
)

// spareThreads are those beyond one per processor.
const spareThreads = 2

// The linker sets it, and only if somebody refers to it.
var _ = version.Version()

//go:linkname precompiledPrograms gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var precompiledPrograms map[string]precompiledseccomp.Program

func main() {
	if slices.Contains(os.Args, "boot") {
		gomaxprocs.Add(spareThreads)
		// Makes the map.
		filter.ListPrecompiled()
		register(precompiledPrograms)
	}
	maincli.Main()
}
