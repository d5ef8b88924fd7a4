package container

import (
	"fmt"
	"os"
	"strings"
)

// openRootfsImages opens the EROFS images that the root filesystem lies in: one, or several from the top down, a line each.
func openRootfsImages(source string) ([]*os.File, error) {
	var files []*os.File
	for _, path := range strings.Split(source, "\n") {
		f, err := os.Open(path)
		if err != nil {
			for _, f := range files {
				f.Close()
			}
			return nil, fmt.Errorf("opening rootfs image %q: %v", path, err)
		}
		files = append(files, f)
	}
	return files, nil
}
