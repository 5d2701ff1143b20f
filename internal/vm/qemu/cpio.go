package qemu

import (
	"bytes"
	"fmt"
)

// cpio builds an initramfs in the "newc" format, as the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst describes it. The
// kernel unpacks several of them one after the other.
type cpio struct {
	buf   bytes.Buffer
	inode int
}

func (c *cpio) dir(name string) { c.entry(name, 0o040755, nil) }

func (c *cpio) file(name string, mode int, data []byte) { c.entry(name, 0o100000|mode, data) }

func (c *cpio) entry(name string, mode int, data []byte) {
	c.inode++
	links := 1
	if mode&0o040000 != 0 {
		links = 2
	}
	fmt.Fprintf(&c.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.inode, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name)
	c.align()
	c.buf.Write(data)
	c.align()
}

func (c *cpio) align() {
	for c.buf.Len()%4 != 0 {
		c.buf.WriteByte(0)
	}
}

// bytes ends the archive.
func (c *cpio) bytes() []byte {
	c.inode = -1
	c.entry("TRAILER!!!", 0, nil)
	return c.buf.Bytes()
}
