// Command amend changes gVisor's source, in the copy that `go mod vendor` makes, before it is built: amend DIRECTORY, the
// one that is gvisor.dev/gvisor. The files of ours are in _gvisor, at their places in it; what calls them is below.
// Nothing is changed that is not exactly as it was in the version that this was written for.
package main

import (
	"embed"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const ours = "_gvisor"

//go:embed _gvisor
var added embed.FS

type edit struct {
	file, from, to string
}

const (
	fastPath = "pkg/sentry/platform/systrap/metrics.go"
	patching = "pkg/sentry/platform/systrap/usertrap/usertrap_amd64.go"
	loading  = "pkg/tcpip/transport/tcp/endpoint_state.go"
	received = "pkg/tcpip/transport/tcp/rcv.go"
)

var edits = []edit{
	// judge.go
	{fastPath, `
	fastPathContextLimit = uint32(maxSysmsgThreads * 2)
`, `
	fastPathContextLimit = uint32(maxSysmsgThreads * 2)
	judge := newJudge(&fastpath)
`},
	{fastPath, "\t\tfastpath.curState(&fastpath)\n", "\t\tjudge.period(&fastpath)\n"},
	{fastPath, "\t\t\tfastpath.park()\n", "\t\t\tjudge.park(&fastpath)\n"},
	// hot.go
	{patching, `
	tableAddr hostarch.Addr
}
`, `
	tableAddr hostarch.Addr
	// Not saved: counting begins anew.
	calls calls
}
`},
	{patching, `
	sysno := ac.SyscallNo()
	patchAddr :=`, `
	if !s.calls.again(ac.IP()) {
		return nil
	}

	sysno := ac.SyscallNo()
	patchAddr :=`},
	// restored.go
	{loading, "AfterFunc(e.getTimeWaitDuration(), e.timeWaitTimerExpired)", "AfterFunc(restoredTimeWait, e.timeWaitTimerExpired)"},
	{received, `
	if s.flags.Contains(header.TCPFlagSyn) && r.RcvNxt.LessThan(segSeq) {
`, `
	if s.flags.Contains(header.TCPFlagSyn) && (r.RcvNxt.LessThan(segSeq) || r.ep.wasRestored()) {
`},
}

func main() {
	if len(os.Args) != 2 {
		fail("usage: amend DIRECTORY")
	}
	root := os.Args[1]
	for _, edit := range edits {
		if err := edit.make(root); err != nil {
			fail(err)
		}
	}
	files, err := fs.Sub(added, ours)
	if err == nil {
		err = os.CopyFS(root, files)
	}
	if err != nil {
		fail(err)
	}
}

func (e edit) make(root string) error {
	path := filepath.Join(root, e.file)
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if count := strings.Count(string(content), e.from); count != 1 {
		return fmt.Errorf("%s: %q is there %d times rather than once: this is another version of gVisor", e.file, e.from, count)
	}
	return os.WriteFile(path, []byte(strings.Replace(string(content), e.from, e.to, 1)), 0o644)
}

func fail(why any) {
	fmt.Fprintln(os.Stderr, "amend:", why)
	os.Exit(1)
}
