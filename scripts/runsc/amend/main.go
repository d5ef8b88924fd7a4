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

	image      = "pkg/erofs/erofs.go"
	imageBytes = "pkg/erofs/erofs_unsafe.go"
	mounted    = "pkg/sentry/fsimpl/erofs/erofs.go"
	fileOf     = "pkg/sentry/fsimpl/erofs/regular_file.go"
	loaded     = "pkg/sentry/fsimpl/erofs/save_restore.go"
	mounting   = "runsc/boot/vfs.go"
	opening    = "runsc/container/container.go"
)

var edits = []edit{
	// Files go into an archive in pieces: one on disk may be larger than memory.
	{"pkg/sentry/fsimpl/tmpfs/tar.go", `
	data := make([]byte, rf.size.RacyLoad())
	dst := usermem.BytesIOSequence(data)
	rw := getRegularFileReadWriter(rf, 0, 0)
	n, err := dst.CopyOutFrom(ctx, rw)
	putRegularFileReadWriter(rw)
	if err != nil && err != io.EOF {
		return fmt.Errorf("failed to read file content: %w", err)
	}
	if n != int64(len(data)) {
		return fmt.Errorf("failed to read all file content, got %d bytes, want %d", n, len(data))
	}
	if _, err := tw.Write(data); err != nil {
		return fmt.Errorf("failed to write file content to tar: %w", err)
	}
	return nil
`, `
	size := rf.size.RacyLoad()
	piece := make([]byte, min(size, 1<<20))
	for done := uint64(0); done < size; {
		data := piece[:min(size-done, uint64(len(piece)))]
		rw := getRegularFileReadWriter(rf, int64(done), 0)
		n, err := usermem.BytesIOSequence(data).CopyOutFrom(ctx, rw)
		putRegularFileReadWriter(rw)
		if err != nil && err != io.EOF {
			return fmt.Errorf("failed to read file content: %w", err)
		}
		if n != int64(len(data)) {
			return fmt.Errorf("failed to read all file content, got %d bytes at %d, want %d", n, done, len(data))
		}
		if _, err := tw.Write(data); err != nil {
			return fmt.Errorf("failed to write file content to tar: %w", err)
		}
		done += uint64(n)
	}
	return nil
`},
	// The writable layer takes a limit of files, too: what is kept about each is in memory. A comma would end the flag.
	{"runsc/boot/vfs.go", `Data += "size=" + mountConf.Size`, `Data += "size=" + strings.ReplaceAll(mountConf.Size, ";", ",")`},
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
	// layers.go of pkg/erofs
	{image, `
	bytes []byte   ` + "`state:\"nosave\"`" + `
	sb    SuperBlock
}
`, `
	bytes []byte   ` + "`state:\"nosave\"`" + `
	// start is where src lies in the image, above lower.
	start uint64  ` + "`state:\"nosave\"`" + `
	lower []layer ` + "`state:\"nosave\"`" + `
	sb    SuperBlock
}
`},
	{image, `
// On success, the ownership of src is transferred to Image.
func OpenImage(src *os.File) (*Image, error) {
`, `
// On success, the ownership of src, and of the files that it lies on, is transferred to Image.
func OpenImage(src *os.File, lower ...*os.File) (*Image, error) {
`},
	{image, `
	cu.Add(func() { unix.Munmap(i.bytes) })

	if err := i.initSuperBlock(); err != nil {
		return nil, err
	}
	cu.Release()
`, `
	cu.Add(func() { unix.Munmap(i.bytes) })
	cu.Add(i.unmapLower)
	if err := i.mapLower(lower); err != nil {
		return nil, err
	}

	if err := i.initSuperBlock(); err != nil {
		return nil, err
	}
	if err := i.checkLower(); err != nil {
		return nil, err
	}
	cu.Release()
`},
	{image, `
	unix.Munmap(i.bytes)
	i.src.Close()
`, `
	unix.Munmap(i.bytes)
	i.src.Close()
	i.unmapLower()
	for _, l := range i.lower {
		l.src.Close()
	}
`},
	{image, "\treturn uint64(i.sb.RootNid)\n", "\treturn i.rootNid()\n"},
	{image, "i.unmarshalAt(&i.sb, SuperBlockOffset)", "i.unmarshalAt(&i.sb, i.start+SuperBlockOffset)"},
	{image, "^uint32(FeatureIncompatSupported)", "^i.supported()"},
	{image, "i.BytesAt(off, uint64(i.BlockSize())-off)", "i.BytesAt(i.start+off, uint64(i.BlockSize())-off)"},
	{image, `
	size := uint64(len(i.bytes))
	end := off + n
	return off < size && off <= end && end <= size
`, `
	return i.at(off, n) != nil
`},
	{image, `
	if ok := i.checkRange(off, n); !ok {
		log.Warningf("Invalid byte range (off: 0x%x, n: 0x%x) for image (size: 0x%x)", off, n, len(i.bytes))
		return nil, linuxerr.EFAULT
	}
	return i.bytes[off : off+n], nil
`, `
	bytes := i.at(off, n)
	if bytes == nil {
		log.Warningf("Invalid byte range (off: 0x%x, n: 0x%x) for image (size: 0x%x)", off, n, i.start+uint64(len(i.bytes)))
		return nil, linuxerr.EFAULT
	}
	return bytes, nil
`},
	{imageBytes, `
	// Although callers will always do the range check, there is no need to
	// bother with the slice's builtin range check below. Because this function
	// will be inlined into callers, and there are no redundant checks and
	// unnecessary out-of-range panic calls in the code generated by the compiler.
	return unsafe.Pointer(&i.bytes[off])
`, `
	return unsafe.Pointer(unsafe.SliceData(i.at(off, 1)))
`},
	// layers.go of pkg/sentry/fsimpl/erofs
	{mounted, "\t\"os\"\n", ""},
	{mounted, "\t\"strconv\"\n", ""},
	{mounted, `
	mf imageMemmapFile
`, `
	mf imageMemmapFile

	// lowerMF are the same for the files that the image lies on. lowerMF is immutable.
	lowerMF []imageMemmapFile ` + "`state:\"nosave\"`" + `
`},
	{mounted, `
	fd, err := getFDFromMountOptionsMap(ctx, mopts)
	if err != nil {
		return nil, nil, err
	}

	f := os.NewFile(uintptr(fd), "EROFS image file")
	image, err := erofs.OpenImage(f)
	if err != nil {
		f.Close()
		return nil, nil, err
	}
`, `
	fds, err := getFDsFromMountOptionsMap(ctx, mopts)
	if err != nil {
		return nil, nil, err
	}

	image, err := openImage(fds)
	if err != nil {
		return nil, nil, err
	}
`},
	{mounted, "shouldUseReadForIO(ctx, fd)", "shouldUseReadForIO(ctx, fds[0])"},
	{mounted, `
	fs.vfsfs.Init(vfsObj, &fstype, fs)
`, `
	fs.initLower()
	fs.vfsfs.Init(vfsObj, &fstype, fs)
`},
	{mounted, "func getFDFromMountOptionsMap(ctx context.Context, mopts map[string]string) (int, error) {", "func getFDsFromMountOptionsMap(ctx context.Context, mopts map[string]string) ([]int, error) {"},
	{mounted, `as '%s=<file descriptor>'", moptImageFD)
		return -1, linuxerr.EINVAL
`, `as '%s=<file descriptor>'", moptImageFD)
		return nil, linuxerr.EINVAL
`},
	{mounted, `
	ifd, err := strconv.Atoi(ifdstr)
`, `
	ifds, err := parseFDs(ifdstr)
`},
	{mounted, `moptImageFD, ifdstr)
		return -1, linuxerr.EINVAL
	}

	return ifd, nil
`, `moptImageFD, ifdstr)
		return nil, linuxerr.EINVAL
	}

	return ifds, nil
`},
	{fileOf, "hostfd.Preadv2(int32(r.image.FD()), dsts, int64(imageOff), 0 /* flags */)", "hostfd.Preadv2(int32(r.image.FileFD(file)), dsts, int64(imageOff-start), 0 /* flags */)"},
	{fileOf, `
			if r.useRead {
`, `
			if r.useRead {
				file, start := r.image.FileAt(imageOff)
`},
	{fileOf, `
	mr := optional
	return []memmap.Translation{
		{
			Source: mr,
			File:   &i.fs.mf,
			Offset: mr.Start + offset,
`, `
	mr := optional
	file, offset := i.fs.fileAt(offset)
	return []memmap.Translation{
		{
			Source: mr,
			File:   file,
			Offset: mr.Start + offset,
`},
	{fileOf, `
	image *erofs.Image
}

// IncRef implements`, `
	image *erofs.Image

	// number is which of the image's files it is.
	number int ` + "`state:\"nosave\"`" + `
}

// IncRef implements`},
	{fileOf, "mf.image.BytesAt(fr.Start, fr.Length())", "mf.image.BytesAt(mf.image.FileStart(mf.number)+fr.Start, fr.Length())"},
	{fileOf, `
	return mf.image.FD()
`, `
	return mf.image.FileFD(mf.number)
`},
	{loaded, "\t\"os\"\n\n\t\"gvisor.dev/gvisor/pkg/erofs\"\n", "\n"},
	{loaded, `
	newImage, err := erofs.OpenImage(os.NewFile(uintptr(fd), "EROFS image file"))
`, `
	newImage, err := restoredImage(fdmap, fs.iopts.UniqueID, fd)
`},
	{loaded, `
	*fs.image = *newImage
`, `
	*fs.image = *newImage
	fs.initLower()
`},
	{mounting, `
		fsName = erofs.Name
		opts = &vfs.MountOptions{
`, `
		fsName = erofs.Name
		lowerFDs, err := erofs.LowerFDs(ioFD, c.goferFDs.remove)
		if err != nil {
			return nil, fmt.Errorf("reading rootfs image: %w", err)
		}
		opts = &vfs.MountOptions{
`},
	{mounting, `fmt.Sprintf("ifd=%d", ioFD)`, `erofs.ImageOption(ioFD, lowerFDs)`},
	{mounting, `
	restoreMnts.fdmap[rootKey] = c.goferFDs.remove()

	if rootfsConf := c.goferMountConfs[0]; rootfsConf.IsFilestorePresent() {
`, `
	restoreMnts.fdmap[rootKey] = c.goferFDs.remove()

	rootfsConf := c.goferMountConfs[0]
	if rootfsConf.ShouldUseErofs() {
		lowerFDs, err := erofs.LowerFDs(restoreMnts.fdmap[rootKey], c.goferFDs.remove)
		if err != nil {
			return fmt.Errorf("reading rootfs image: %w", err)
		}
		for n, fd := range lowerFDs {
			restoreMnts.fdmap[erofs.LowerID(rootKey, n)] = fd
		}
	}
	if rootfsConf.IsFilestorePresent() {
`},
	// images.go
	{opening, `
		ioFile, err := os.Open(rootfsHint.Mount.Source)
		if err != nil {
			return nil, nil, nil, nil, fmt.Errorf("opening rootfs image %q: %v", rootfsHint.Mount.Source, err)
		}
		ioFiles := []*os.File{ioFile}
`, `
		ioFiles, err := openRootfsImages(rootfsHint.Mount.Source)
		if err != nil {
			return nil, nil, nil, nil, err
		}
`},
	{opening, `
		f, err := os.Open(rootfsHint.Mount.Source)
		if err != nil {
			return nil, nil, nil, nil, fmt.Errorf("opening rootfs image %q: %v", rootfsHint.Mount.Source, err)
		}
		sandEnds = append(sandEnds, f)
	}

	// Handle sub mounts
`, `
		images, err := openRootfsImages(rootfsHint.Mount.Source)
		if err != nil {
			return nil, nil, nil, nil, err
		}
		sandEnds = append(sandEnds, images...)
	}

	// Handle sub mounts
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
