package box

import "testing"

func TestBaseIsOf(t *testing.T) {
	const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for id, want := range map[string]bool{
		digest:                              true, // as smolvm's driver has it
		digest[len("sha256:"):]:             true, // qemu's, and the prepared bases
		digest[len("sha256:"):][:32]:        true, // podman's tags
		"123456789abcdef0123456789abcdef01": false,
		"sha256:1123456789abcdef":           false,
		"":                                  false,
	} {
		if got := isOf(id, digest); got != want {
			t.Errorf("%q is of the base: %v, want %v", id, got, want)
		}
	}
	if isOf("sha256:", "") {
		t.Error("a base of a record without a digest")
	}
}
