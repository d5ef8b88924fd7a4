package erofs

import (
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/hostarch"
)

// An image may lie in several files: the topmost has what changed, and refers to the ones below it for the rest. All of them
// together are one address space, in which each lies above the one below, and in which inode numbers and block addresses are
// meant. The topmost lists the others in EROFS's device table, from the top down. No object lies in two of them.

const (
	// FeatureIncompatLayers says that the image is of no use without those below. One bit is EROFS's (there is a device
	// table), the other one nobody's but ours: no other implementation looks for inodes in a device.
	FeatureIncompatLayers = 1<<31 | 1<<3

	deviceSlotSize    = 128
	deviceBlocksAt    = 64
	deviceAddressAt   = 68
	maxLower          = 23
	wideRootNidAt     = 22 // in SuperBlock.Reserved, where EROFS's 48-bit layout has it
	deviceTableOffset = SuperBlockOffset + SuperBlockSize
)

// layer is a file below the topmost one.
type layer struct {
	src   *os.File
	bytes []byte
	start uint64
}

// LowerCount returns how many files there must be below an image.
func LowerCount(fd int) (int, error) {
	var raw [SuperBlockSize]byte
	if n, err := unix.Pread(fd, raw[:], SuperBlockOffset); err != nil || n != len(raw) {
		return 0, fmt.Errorf("the superblock cannot be read: %d bytes, %v", n, err)
	}
	var sb SuperBlock
	sb.UnmarshalUnsafe(raw[:])
	if sb.FeatureIncompat != FeatureIncompatLayers {
		return 0, nil
	}
	if sb.ExtraDevices == 0 || sb.ExtraDevices > maxLower {
		return 0, fmt.Errorf("the image lies on %d others; at most %d are supported", sb.ExtraDevices, maxLower)
	}
	return int(sb.ExtraDevices), nil
}

// mapLower maps the files below, given from the top down, and says where the topmost begins.
func (i *Image) mapLower(files []*os.File) error {
	if len(files) > maxLower {
		return linuxerr.EINVAL
	}
	i.lower = make([]layer, len(files))
	for n := len(files) - 1; n >= 0; n-- {
		stat, err := files[n].Stat()
		if err != nil {
			return err
		}
		size := stat.Size()
		if size <= 0 || size%hostarch.PageSize != 0 {
			return fmt.Errorf("a lower image has %d bytes", size)
		}
		bytes, err := unix.Mmap(int(files[n].Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		i.lower[n] = layer{src: files[n], bytes: bytes, start: i.start}
		i.start += uint64(size)
	}
	return nil
}

func (i *Image) unmapLower() {
	for _, l := range i.lower {
		if l.bytes != nil {
			unix.Munmap(l.bytes)
		}
	}
}

// supported returns the incompatible features that the image may have.
func (i *Image) supported() uint32 {
	if len(i.lower) == 0 {
		return FeatureIncompatSupported
	}
	return FeatureIncompatLayers
}

// checkLower checks that the files below are those that the topmost means.
func (i *Image) checkLower() error {
	if len(i.lower) == 0 {
		return nil
	}
	if i.sb.FeatureIncompat != FeatureIncompatLayers || int(i.sb.ExtraDevices) != len(i.lower) || i.sb.MetaBlockAddr != 0 {
		return fmt.Errorf("the image does not lie on %d others", len(i.lower))
	}
	if i.BlockSize() != hostarch.PageSize || uint64(i.sb.DevTableSlotOff)*deviceSlotSize != deviceTableOffset {
		return fmt.Errorf("unsupported device table")
	}
	table, err := i.BytesAt(i.start+deviceTableOffset, uint64(len(i.lower))*deviceSlotSize)
	if err != nil {
		return err
	}
	for n, l := range i.lower {
		slot := table[n*deviceSlotSize:]
		blocks := uint64(binary.LittleEndian.Uint32(slot[deviceBlocksAt:]))
		address := uint64(binary.LittleEndian.Uint32(slot[deviceAddressAt:]))
		if blocks<<i.sb.BlockSizeBits != uint64(len(l.bytes)) || address<<i.sb.BlockSizeBits != l.start {
			return fmt.Errorf("lower image %d is another one: %d bytes at 0x%x, expected 0x%x blocks at block 0x%x", n, len(l.bytes), l.start, blocks, address)
		}
	}
	return nil
}

// rootNid returns the number of the root inode.
func (i *Image) rootNid() uint64 {
	if len(i.lower) == 0 {
		return uint64(i.sb.RootNid)
	}
	return binary.LittleEndian.Uint64(i.sb.Reserved[wideRootNidAt:])
}

// at returns the bytes at [off, off+n), or nil where they are not all in one file.
func (i *Image) at(off, n uint64) []byte {
	bytes, start := i.bytes, i.start
	if off < start {
		for l := range i.lower {
			if off >= i.lower[l].start {
				bytes, start = i.lower[l].bytes, i.lower[l].start
				break
			}
		}
	}
	off -= start
	size := uint64(len(bytes))
	if end := off + n; off < size && off <= end && end <= size {
		return bytes[off:end:end]
	}
	return nil
}

// Files returns in how many files the image lies.
func (i *Image) Files() int {
	return 1 + len(i.lower)
}

// FileAt returns the number of the file, from the top down, that an offset lies in, and where in the image that file begins.
func (i *Image) FileAt(off uint64) (int, uint64) {
	if off >= i.start {
		return 0, i.start
	}
	for l := range i.lower {
		if off >= i.lower[l].start {
			return l + 1, i.lower[l].start
		}
	}
	return 0, i.start // There is always one that begins at 0.
}

// FileFD returns the host FD of a file, by its number.
func (i *Image) FileFD(number int) int {
	if number == 0 {
		return i.FD()
	}
	return int(i.lower[number-1].src.Fd())
}

// FileStart returns where in the image a file begins, by its number.
func (i *Image) FileStart(number int) uint64 {
	if number == 0 {
		return i.start
	}
	return i.lower[number-1].start
}
