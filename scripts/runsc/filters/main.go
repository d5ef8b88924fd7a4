// Command filters writes the seccomp filters of the sentry as Go code for the program next to it.
package main

import (
	"fmt"
	"os"
	"strings"

	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

// What Atoll's sentries are. Others, with devices passed through, say, compile theirs when they start.
var wanted = []string{
	`Platform="systrap"`, "HostNetwork=false", "ProfileEnable=false", "NVProxy=false", "TPUProxy=false", "RDMAProxy=false",
	"CgoEnabled=false", "PluginNetwork=false",
}

func main() {
	programs, err := config.PrecompiledPrograms()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var code strings.Builder
	code.WriteString("// Written by ./filters; do not keep it.\npackage main\n\n" +
		"import \"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp\"\n\n" +
		"func register(programs map[string]precompiledseccomp.Program) {\n")
	written := 0
	for _, program := range programs {
		if matches(program.Name) {
			code.WriteString(program.Registration("\t", "precompiledseccomp", "programs"))
			written++
		}
	}
	if written == 0 {
		fmt.Fprintln(os.Stderr, "no filter is for a sentry of Atoll's: gVisor's options have other names now")
		os.Exit(1)
	}
	code.WriteString("}\n")
	fmt.Print(code.String())
}

func matches(name string) bool {
	for _, part := range wanted {
		if !strings.Contains(name, part) {
			return false
		}
	}
	return true
}
