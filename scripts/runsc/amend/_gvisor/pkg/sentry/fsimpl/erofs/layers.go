package erofs

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"gvisor.dev/gvisor/pkg/erofs"
	"gvisor.dev/gvisor/pkg/sentry/checkpoint"
	"gvisor.dev/gvisor/pkg/sentry/memmap"
)

// LowerFDs takes the FDs of the files that an image lies on, from the top down; next gives them in this order.
func LowerFDs(top int, next func() int) ([]int, error) {
	count, err := erofs.LowerCount(top)
	if err != nil {
		return nil, err
	}
	fds := make([]int, count)
	for n := range fds {
		fds[n] = next()
	}
	return fds, nil
}

// ImageOption returns the mount option for an image and those that it lies on.
func ImageOption(top int, lower []int) string {
	option := fmt.Sprintf("%s=%d", moptImageFD, top)
	for _, fd := range lower {
		option += fmt.Sprintf(":%d", fd)
	}
	return option
}

// LowerID returns what the FD of a lower file is known by during restore. No mount has such a path.
func LowerID(of checkpoint.ResourceID, number int) checkpoint.ResourceID {
	of.Path = fmt.Sprintf("%s\x00%d", of.Path, number)
	return of
}

// parseFDs reads the value of the option.
func parseFDs(value string) ([]int, error) {
	var fds []int
	for _, word := range strings.Split(value, ":") {
		fd, err := strconv.Atoi(word)
		if err != nil {
			return nil, err
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// openImage takes ownership of the FDs.
func openImage(fds []int) (*erofs.Image, error) {
	files := make([]*os.File, len(fds))
	for n, fd := range fds {
		files[n] = os.NewFile(uintptr(fd), "EROFS image file")
	}
	image, err := erofs.OpenImage(files[0], files[1:]...)
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return nil, err
	}
	return image, nil
}

// restoredImage opens the files that were given for a restore.
func restoredImage(fdmap map[checkpoint.ResourceID]int, id checkpoint.ResourceID, top int) (*erofs.Image, error) {
	count, err := erofs.LowerCount(top)
	if err != nil {
		return nil, err
	}
	fds := []int{top}
	for n := 0; n < count; n++ {
		fd, ok := fdmap[LowerID(id, n)]
		if !ok {
			return nil, fmt.Errorf("no FD for lower image %d", n)
		}
		fds = append(fds, fd)
	}
	return openImage(fds)
}

// initLower makes what maps the files below the topmost, whose own is fs.mf.
func (fs *filesystem) initLower() {
	fs.lowerMF = make([]imageMemmapFile, fs.image.Files()-1)
	for n := range fs.lowerMF {
		fs.lowerMF[n] = imageMemmapFile{image: fs.image, number: n + 1}
	}
}

// fileAt returns the file that an offset of the image lies in, and the offset there.
func (fs *filesystem) fileAt(off uint64) (memmap.File, uint64) {
	number, start := fs.image.FileAt(off)
	if number == 0 {
		return &fs.mf, off - start
	}
	return &fs.lowerMF[number-1], off - start
}
